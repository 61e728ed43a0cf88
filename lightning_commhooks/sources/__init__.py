"""Where buckets come from: the reducer of `DistributedDataParallel`, and the reduce-scatters of FSDP."""

"""Lightning: strategies, callbacks, Fabric, names of strategies."""

"""Train a small causal language model with `transformers.Trainer` and a communication hook.

The text is this Python's own documentation strings, character by character; nothing is downloaded. In two processes:

    python -m torch.distributed.run --nproc-per-node 2 examples/transformers/language_model.py --hook powersgd
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from accelerate_integration import use_comm_hook
from lightning_commhooks import PostLocalSGD, PowerSGD, available_hooks

LENGTH = 64


class Text(Dataset):
    """Pieces of text as bytes."""

    def __init__(self, first: int, last: int) -> None:
        text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
        self.pieces = torch.tensor(list(text[first * LENGTH : last * LENGTH])).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    """Train, evaluate, and print the bytes sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", default="powersgd", choices=available_hooks())
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=args.steps,
                per_device_train_batch_size=16,
                learning_rate=2e-3,
                eval_strategy="steps",
                eval_steps=max(args.steps // 2, 1),
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                ddp_find_unused_parameters=False,
            ),
            train_dataset=Text(0, 4000),
            eval_dataset=Text(4000, 4200),
        )
        # Start early in this short run; otherwise a name is enough.
        configured = {
            "powersgd": PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=10),
            "post_localsgd": PostLocalSGD(start_localSGD_iter=20, post_local_gradient_allreduce=False),
        }
        # Only this line is new.
        handler = use_comm_hook(trainer, configured.get(args.hook, args.hook))
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    metrics = handler.attachments[0].metrics()
    if trainer.is_world_process_zero():
        print(
            f"{args.hook}: loss {loss:.2f} after {args.steps} steps, {metrics['bytes_sent'] / metrics['steps']:,.0f} "
            f"bytes sent per step, {metrics['compression_ratio']:.1f}x less than dense"
        )


if __name__ == "__main__":
    main()

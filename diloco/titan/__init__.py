"""Islands around torchtitan's trainer. Needs torchtitan; docs/library.md says with which torch.

    torchrun --nproc-per-node 8 -m torchtitan.train --module diloco.titan --config llama3_8b \
        --islands run.yaml --island island.index=1,island.bootstrap=[ADDRESS]

`--config` finds every config of torchtitan's own models. For a registry of your own, wrap its
configs in `diloco.titan.trainer.with_islands`. Nothing of torchtitan is patched: its trainer and
four of its components are subclassed.
"""

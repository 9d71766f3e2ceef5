"""The run's text in a loop of one's own: python examples/own_data.py island.index=0
island.bootstrap=[ADDRESS]
"""

import sys
from pathlib import Path

import torch
from small_llama import build_llama

import diloco

HERE = Path(__file__).parent
SAVED = Path(f"saved-{'-'.join(arg for arg in sys.argv if arg.startswith('island.index'))}.pt")

model = build_llama(vocab_size=260)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
saved = torch.load(SAVED, weights_only=True) if SAVED.exists() else None
if saved is not None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
places = (
    f"island.data_paths=[{HERE.parent}/README.md, "
    f"{HERE.parent}/docs/*.md]"
)  # where they are on this machine
islands = diloco.Islands(
    HERE / "run_data.yaml",
    model,
    optimizer,
    [places, *sys.argv[1:]],
    state=saved and saved["islands"],
)
for batch in diloco.data(islands):
    logits = model(input_ids=batch.inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if report := islands.step(tokens=batch.num_tokens, loss=loss):
        print(
            f"round {report.round} with {', '.join(report.participants)}: loss {loss.item():.3f}",
            flush=True,
        )
        parts = {"model": model, "optimizer": optimizer, "islands": islands}
        torch.save({name: part.state_dict() for name, part in parts.items()}, f"{SAVED}.new")
        Path(f"{SAVED}.new").replace(SAVED)
print(f"the run is over, digest {islands.digest}")

"""The user's own model, optimizers and ranks, as islands see them."""

"""Somebody's model, optimizers and ranks, as islands see them."""

"""The `outer` section of the run config. It does not import torch, so that config errors appear
fast."""

from outer.config.optimizer import AlignConfig, OuterOptimizerConfig
from outer.config.outer import AT_RENDEZVOUS, CODECS, MAX_TLS_STREAMS, PORTS_OF_TLS, OuterConfig
from outer.config.section import Section
from outer.config.sharing import MERGE_RULES, CodingConfig, GossipConfig, MergeConfig

__all__ = [
    "AT_RENDEZVOUS",
    "CODECS",
    "MAX_TLS_STREAMS",
    "MERGE_RULES",
    "PORTS_OF_TLS",
    "AlignConfig",
    "CodingConfig",
    "GossipConfig",
    "MergeConfig",
    "OuterConfig",
    "OuterOptimizerConfig",
    "Section",
]

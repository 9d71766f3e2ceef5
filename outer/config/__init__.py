"""The `outer` section of the run config. It does not import torch, so that config errors appear
fast.
"""

from outer.config.networks import NETWORKS, PORTS_OF_TLS, NetworkFacts
from outer.config.optimizer import AlignConfig, OuterOptimizerConfig
from outer.config.outer import BETWEEN_RULES, CODECS, MAX_TLS_STREAMS, OuterConfig
from outer.config.section import Section
from outer.config.sharing import (
    MERGE_RULES,
    CodingConfig,
    ExpertSharingConfig,
    GossipConfig,
    MergeConfig,
)

__all__ = [
    "BETWEEN_RULES",
    "CODECS",
    "MAX_TLS_STREAMS",
    "MERGE_RULES",
    "NETWORKS",
    "PORTS_OF_TLS",
    "AlignConfig",
    "CodingConfig",
    "ExpertSharingConfig",
    "GossipConfig",
    "MergeConfig",
    "NetworkFacts",
    "OuterConfig",
    "OuterOptimizerConfig",
    "Section",
]

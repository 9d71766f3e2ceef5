"""Config of one island: model, data, optimizer and parallelism. It does not import torch, so config
errors appear fast.
"""

from inner.config.data import DataConfig, EvaluateConfig, MixtureEntry, ShardsConfig, SourceConfig
from inner.config.decoder import Activation, DecoderConfig, NormKind, WindowConfig
from inner.config.experts import BalanceConfig, ExpertsConfig, LatentConfig, PredictConfig
from inner.config.model import ROPE_KEYS, ModelConfig, QkNorm, RopeScaling
from inner.config.optimizer import AveragingConfig, OptimizerConfig, ParamGroup, SpikeConfig
from inner.config.parallel import (
    Accumulate,
    ContextMethod,
    MeshConfig,
    ParallelConfig,
    ProfileConfig,
    Recompute,
    Schedule,
)
from inner.config.section import Section
from inner.config.stages import StageConfig

__all__ = [
    "ROPE_KEYS",
    "Accumulate",
    "Activation",
    "AveragingConfig",
    "BalanceConfig",
    "ContextMethod",
    "DataConfig",
    "DecoderConfig",
    "EvaluateConfig",
    "ExpertsConfig",
    "LatentConfig",
    "MeshConfig",
    "MixtureEntry",
    "ModelConfig",
    "NormKind",
    "OptimizerConfig",
    "ParallelConfig",
    "ParamGroup",
    "PredictConfig",
    "ProfileConfig",
    "QkNorm",
    "Recompute",
    "RopeScaling",
    "Schedule",
    "Section",
    "ShardsConfig",
    "SourceConfig",
    "SpikeConfig",
    "StageConfig",
    "WindowConfig",
]

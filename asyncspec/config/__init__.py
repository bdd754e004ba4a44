"""The configuration of a run: its fields, how it is composed and checked, and which node runs which actors."""

from asyncspec.config.deployment import MockConfig
from asyncspec.config.download import fetch_all, fetched_data, fetched_model, fetched_weights, hub_names, use_names
from asyncspec.config.learning import OptimizerConfig, RLConfig
from asyncspec.config.load import from_yaml, load, nearest_field, to_yaml
from asyncspec.config.paths import (
    CONFIG_DIR,
    PACKAGE_DIR,
    data_files,
    default_run_dir,
    make_paths_absolute,
    resolve_path,
    sources,
)
from asyncspec.config.schema import LONGEST_DRAFT, Config, default_of
from asyncspec.config.sections import DataConfig, DraftConfig, SpeculationConfig
from asyncspec.config.training import TrainerConfig
from asyncspec.errors import ConfigError, UserError, first_line

__all__ = [
    "CONFIG_DIR",
    "LONGEST_DRAFT",
    "PACKAGE_DIR",
    "Config",
    "ConfigError",
    "DataConfig",
    "DraftConfig",
    "MockConfig",
    "OptimizerConfig",
    "RLConfig",
    "SpeculationConfig",
    "TrainerConfig",
    "UserError",
    "data_files",
    "default_of",
    "default_run_dir",
    "fetch_all",
    "fetched_data",
    "fetched_model",
    "fetched_weights",
    "first_line",
    "from_yaml",
    "hub_names",
    "load",
    "make_paths_absolute",
    "nearest_field",
    "resolve_path",
    "sources",
    "to_yaml",
    "use_names",
]

"""Checkpoints that survive the machine: atomic, verified, in the background, without pickle."""

from ._checkpoint import Checkpoint, CheckpointError
from ._load import list_checkpoints, load_checkpoint, load_state, prune, verify
from ._rng import rng_state, set_rng_state
from ._save import save_state
from ._saver import Saver, SaverStatus, background_saver
from ._snapshot import Placed, put_snapshot, snapshot_tree, take_snapshot
from ._storage import Storage, open_storage

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Placed",
    "Saver",
    "SaverStatus",
    "Storage",
    "background_saver",
    "list_checkpoints",
    "load_checkpoint",
    "load_state",
    "open_storage",
    "prune",
    "put_snapshot",
    "rng_state",
    "save_state",
    "set_rng_state",
    "snapshot_tree",
    "take_snapshot",
    "verify",
]
__version__ = "0.3.0"

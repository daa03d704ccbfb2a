"""Checkpoints that survive the machine: atomic, verified, in the background, without pickle."""

from ._background import background_saver
from ._checkpoint import Checkpoint, CheckpointError
from ._copy import copy_checkpoint
from ._inventory import Inventory, remove_checkpoint, take_inventory
from ._load import list_checkpoints, load_checkpoint, load_state, prune, verify
from ._retention import Retention
from ._rng import rng_state, set_rng_state
from ._save import save_state
from ._saver import Saver
from ._snapshot import Placed, put_snapshot, snapshot_tree, take_snapshot
from ._spool import Spool, spooled
from ._status import SaverStatus
from ._storage import Storage, open_storage
from ._uploader import UploadStatus

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Inventory",
    "Placed",
    "Retention",
    "Saver",
    "SaverStatus",
    "Spool",
    "Storage",
    "UploadStatus",
    "background_saver",
    "copy_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_state",
    "open_storage",
    "prune",
    "put_snapshot",
    "remove_checkpoint",
    "rng_state",
    "save_state",
    "set_rng_state",
    "snapshot_tree",
    "spooled",
    "take_inventory",
    "take_snapshot",
    "verify",
]
__version__ = "0.3.0"

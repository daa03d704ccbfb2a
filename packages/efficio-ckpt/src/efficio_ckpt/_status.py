"""What a saver says about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._uploader import UploadStatus


@dataclass(frozen=True)
class SaverStatus:
    """What a saver has done so far.

    Args:
        last_step: Step of the newest checkpoint that it has committed.
        in_flight_step: Step that is being written.
        seconds: From the call to the commit, for the last save.
        blocked_seconds: What the last call of ``save`` took of the caller's time.
        bytes: Size of the last checkpoint.
        committed: Checkpoints that it has committed.
        committed_seconds: From call to commit, for all of these together.
        committed_bytes: Size of all of these together, whether they are still there or not.
        skipped: Calls that found another save in flight.
        error: Text of an error that has not been raised yet.
        upload: How far a remote storage is, where there is one.
    """

    last_step: int | None = None
    in_flight_step: int | None = None
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    bytes: int = 0
    committed: int = 0
    committed_seconds: float = 0.0
    committed_bytes: int = 0
    skipped: int = 0
    error: str | None = None
    upload: UploadStatus = field(default_factory=UploadStatus)

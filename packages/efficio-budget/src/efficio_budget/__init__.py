"""Time budgets, stop signals and platform facts for training that must end on time."""

from ._budget import Budget
from ._duration import parse_duration
from ._host import Host, host, session_limit
from ._secret import secret
from ._stop import Stop, stop_on_signals

__all__ = [
    "Budget",
    "Host",
    "Stop",
    "host",
    "parse_duration",
    "secret",
    "session_limit",
    "stop_on_signals",
]
__version__ = "0.3.0"

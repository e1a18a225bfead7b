"""How a worker writes the tokens of a step that need no message of their own."""

from __future__ import annotations

import struct

# Request, attempt, index, token id; see WorkerFrame.rows.
TOKEN_ROW = struct.Struct("<QIII")

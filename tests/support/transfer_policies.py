"""Times and sizes that unit tests of the transfer machines obey."""

from __future__ import annotations

from services.transfer import receiver as rx
from services.transfer import sender as tx

BLOCK_BYTES = 1024
BLOCK_SIZE = 16
SENDER_POLICY = tx.SenderPolicy(
    block_bytes=BLOCK_BYTES,
    ticket_ttl_s=5.0,
    lease_s=10.0,
    tombstone_s=60.0,
    data_message_bytes=2 * BLOCK_BYTES,
    max_nacks=2,
)
RECEIVER_POLICY = rx.ReceiverPolicy(
    block_bytes=BLOCK_BYTES,
    block_size=BLOCK_SIZE,
    connect_timeout_s=2.0,
    open_timeout_s=2.0,
    max_wait_s=20.0,
    max_transfer_s=120.0,
    stall_timeout_s=2.0,
    max_nacks=2,
    window_s=4.0,
)

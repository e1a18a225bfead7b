"""Limits and times of the transfer layer; every wait, window and table size stands here."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import ConfigError
from services.transfer.fault_script import FaultDeck
from services.transfer.pairing import AS_STORED, WIRE_DTYPES
from services.transfer.planes import DEFAULT_PLANES, FAULT_PLANE, PLANES_BEST_FIRST

KIB = 1024
MIB = 1024 * KIB

MAX_DATA_MESSAGE_BYTES = 4 * MIB
MAX_COPY_THREADS = 4  # by default; measured on two, more wait for the same memory


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Settings of one worker's transfer ends; seconds, bytes and counts, checked when made."""

    planes: tuple[str, ...] = DEFAULT_PLANES  # allowed planes; the order is always best first
    ticket_ttl_s: float = 5.0  # an offer without OPEN is taken back after this
    lease_s: float = 10.0  # an opened transfer without a sign of life is taken back after this
    tombstone_s: float = 60.0  # how long a closed transfer answers duplicates
    connect_timeout_s: float = 2.0  # connection, HELLO and plane set-up
    open_timeout_s: float = 2.0  # OPEN to OPENED, retries included
    max_wait_s: float = 120.0  # decode without memory: how long it may keep the ticket open
    max_transfer_s: float = 600.0  # from open to the end, whatever happens
    progress_timeout_s: float = 2.0  # credited data that does not come is asked for again
    min_rate_bytes_s: float = 1.0 * MIB  # slower links than this count as broken
    ping_interval_s: float = 1.0
    ping_misses: int = 3
    window_bytes: int = 8 * MIB  # credit of one peer's transfers together
    receive_budget_bytes: int = 64 * MIB  # credit of all peers together
    data_message_bytes: int = 2 * MIB
    max_data_in_flight: int = 5  # DATA messages of one peer inside ZMQ; what one window holds
    max_nacks: int = 2  # resends of one block
    wire_dtype: str = AS_STORED  # KV on zmq links; "int8" and "bfloat16" round, and are smaller
    single_shot: bool = True  # announce short prompts at their end where that costs less
    copy_threads: int = 0  # of one long copy over memfd; 0 = one a core, up to MAX_COPY_THREADS
    verify_digest: str = "always"  # or "sampled:N": every Nth block; only memfd ever samples
    attach_max_s: float = 60.0  # blocks read in a peer's pool are asked home after this
    attach_pin_share: float = 0.5  # of a pool that readers in place may hold together
    max_transfers: int = 1024
    max_peers: int = 256
    max_groups: int = 32  # nccl plane: two-rank groups of one end, those being aborted included
    group_build_timeout_s: float = 2.0  # from JOIN to a group that can be used
    group_batch_timeout_s: float = 3.0  # a batch inside the group; then it is aborted
    group_retry_s: float = 30.0  # after an abort the pair stays on another plane this long
    group_slots: int = 4  # staging slots of a group, at each end
    max_bad_frames: int = 16  # then the peer's frames are dropped unread for a minute
    curve_key_file: str | None = None  # key ring shared by the workers of one cluster
    allow_plaintext_kv: bool = False  # plaintext beyond loopback
    fault_deck: FaultDeck | None = None  # of tests only, with "fault" among the planes

    def __post_init__(self) -> None:
        if (FAULT_PLANE in self.planes) != (self.fault_deck is not None):
            raise ConfigError(
                "transfer.planes: fault is for tests, which hand over its deck with it"
            )
        planes = [p for p in self.planes if p != FAULT_PLANE]
        if not planes or any(p not in PLANES_BEST_FIRST for p in planes):
            raise ConfigError(f"transfer.planes: choose from {list(PLANES_BEST_FIRST)}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise ConfigError(f"transfer.wire_dtype: choose from {list(WIRE_DTYPES)}")
        if not 64 * KIB <= self.data_message_bytes <= MAX_DATA_MESSAGE_BYTES:
            raise ConfigError("transfer.data_message_bytes: must be 64 KiB to 4 MiB")
        positive = (
            "ticket_ttl_s lease_s tombstone_s connect_timeout_s open_timeout_s max_wait_s "
            "max_transfer_s progress_timeout_s min_rate_bytes_s ping_interval_s ping_misses "
            "window_bytes receive_budget_bytes max_data_in_flight max_transfers max_peers "
            "max_groups group_build_timeout_s group_batch_timeout_s group_retry_s group_slots "
            "attach_max_s attach_pin_share"
        )
        for name in positive.split():
            if getattr(self, name) <= 0:
                raise ConfigError(f"transfer.{name}: must be more than zero")
        if not 0 <= self.copy_threads <= 16:
            raise ConfigError("transfer.copy_threads: must be 0 to 16")
        _ = self.digest_sampling  # raises on a wrong text

    @property
    def digest_sampling(self) -> int:
        """Verify every Nth block pulled over memfd; 1 is every block."""
        if self.verify_digest == "always":
            return 1
        kind, _, every = self.verify_digest.partition(":")
        if kind != "sampled" or not every.isdigit() or int(every) < 1:
            raise ConfigError('transfer.verify_digest: "always" or "sampled:N" with N >= 1')
        return int(every)

    @property
    def renew_interval_s(self) -> float:
        """Leases are renewed at a third of their length."""
        return self.lease_s / 3

    @property
    def peer_timeout_s(self) -> float:
        """Silence after which a peer counts as lost; one message may be on a slow link."""
        return self.ping_interval_s * self.ping_misses + self.slack_s

    @property
    def stall_timeout_s(self) -> float:
        """No progress on credited data for this long: ask again."""
        return self.progress_timeout_s + self.slack_s

    @property
    def slack_s(self) -> float:
        """Time one DATA message may take on the slowest link we accept."""
        return self.data_message_bytes / self.min_rate_bytes_s


def ordered_planes(config: TransferConfig) -> tuple[str, ...]:
    """Return the allowed planes, best first."""
    return tuple(p for p in PLANES_BEST_FIRST if p in config.planes)

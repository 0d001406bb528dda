//! The names of the metrics, for [`crate::http`], which describes them, and for the code that counts.

pub const RPC_TOTAL: &str = "deltapath_rpc_total";
pub const RPC_SECONDS: &str = "deltapath_rpc_seconds";
pub const STREAM_TUPLES_TOTAL: &str = "deltapath_stream_tuples_total";
pub const STREAM_DESCRIBED_BYTES_TOTAL: &str = "deltapath_stream_described_bytes_total";
pub const VOLUMES: &str = "deltapath_volumes";
pub const RETAINED_SNAPSHOTS: &str = "deltapath_retained_snapshots";
pub const SNAPSHOTS: &str = "deltapath_snapshots";
pub const GROUP_SNAPSHOTS: &str = "deltapath_group_snapshots";
pub const UNREADABLE_OBJECTS: &str = "deltapath_unreadable_objects";
pub const UNHEALTHY_VOLUMES: &str = "deltapath_unhealthy_volumes";
pub const POOL_SIZE_BYTES: &str = "deltapath_pool_size_bytes";
pub const POOL_FREE_BYTES: &str = "deltapath_pool_free_bytes";
pub const HASHING_BACKLOG_BYTES: &str = "deltapath_hashing_backlog_bytes";
pub const TRANSFERS: &str = "deltapath_transfers";
pub const TRANSFER_LEFT_BYTES: &str = "deltapath_transfer_left_bytes";
pub const TRANSFERS_ENDED_TOTAL: &str = "deltapath_transfers_ended_total";
pub const TRANSFER_RECEIVED_BYTES_TOTAL: &str = "deltapath_transfer_received_bytes_total";
pub const TRANSFER_SENT_BYTES_TOTAL: &str = "deltapath_transfer_sent_bytes_total";
pub const CERTIFICATE_NOT_AFTER_SECONDS: &str = "deltapath_certificate_not_after_seconds";
pub const LOG_LINES_DROPPED_TOTAL: &str = "deltapath_log_lines_dropped_total";
pub const READY: &str = "deltapath_ready";

//! The values of the driver's flags.

use std::path::PathBuf;
use std::time::Duration;

use crate::pool::PoolRequest;
use crate::store::TupleStyle;
use base::{Quantity, age};

/// The values of the flags.
#[derive(Clone, Debug)]
pub struct Config {
    /// `--driver-name`.
    pub driver_name: String,
    /// `--node-id`.
    pub node_id: String,
    /// `--data-dir`.
    pub data_dir: PathBuf,
    /// `--pool` and `--pool-size`.
    pub pool: PoolRequest,
    /// `--block-metadata-type`: how tuples are listed if the snapshot has no parameter for it.
    pub tuple_style: TupleStyle,
    /// `--max-volume-size`.
    pub max_volume_size: Quantity,
    /// `--overcommit`: maximum ratio of provisioned capacity to pool size; `None` for no limit.
    pub overcommit: Option<f64>,
    /// `--enable-attach`.
    pub attach: bool,
    /// `--max-volumes-per-node`; 0 for no limit.
    pub max_volumes: u32,
    /// `--retain-deleted`.
    pub retain: Retention,
    /// `--transfer-rate`, per second; `None` for no limit.
    pub transfer_rate: Option<Quantity>,
}

/// `--retain-deleted COUNT[:AGE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The number of deleted snapshots kept for each volume; 0 for none.
    pub count: usize,
    /// How long they are kept.
    pub age: Duration,
}

impl std::str::FromStr for Retention {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let want = "write a count, or a count and an age, such as 8:30d (units s, m, h, d)";
        let (count, age) = match text.split_once(':') {
            Some((count, text)) => (count, age::parse(text).ok_or(want)?),
            None => (text, Retention::default().age),
        };
        Ok(Retention { count: count.parse().map_err(|_| want)?, age })
    }
}

impl Default for Retention {
    fn default() -> Self {
        Retention { count: 8, age: Duration::from_secs(30 * 24 * 3600) }
    }
}

impl std::fmt::Display for Retention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.count, age::format(self.age))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retention_is_a_count_and_an_age() {
        let day = Duration::from_secs(24 * 3600);
        for (text, count, age) in
            [("0", 0, 30 * day), ("8:30d", 8, 30 * day), ("3:90s", 3, Duration::from_secs(90))]
        {
            assert_eq!(text.parse(), Ok(Retention { count, age }), "{text}");
        }
        for bad in ["", ":", "8:", "x", "-1", "8:30", "8:d", "8:30y", "8:30d:1"] {
            assert!(bad.parse::<Retention>().is_err(), "{bad}");
        }
        assert_eq!(Retention::default().to_string(), "8:30d");
    }
}

//! Lengths of time as people write them in flags.

use std::time::Duration;

/// Units and their seconds, the largest first.
const UNITS: [(&str, u64); 4] = [("d", 24 * 3600), ("h", 3600), ("m", 60), ("s", 1)];

/// Reads a whole number and a unit, such as `30d` or `90s`.
pub fn parse(text: &str) -> Option<Duration> {
    let (unit, seconds) = UNITS.iter().find(|(unit, _)| text.ends_with(unit))?;
    let number = text.strip_suffix(unit)?;
    let digits = number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = number.parse().ok().filter(|_| digits)?;
    Some(Duration::from_secs(number.checked_mul(*seconds)?))
}

/// The same length in the largest unit that it is a whole number of.
pub fn format(length: Duration) -> String {
    let seconds = length.as_secs();
    let (unit, size) = UNITS.iter().find(|(_, size)| seconds.is_multiple_of(*size)).unwrap_or(&UNITS[3]);
    format!("{}{unit}", seconds / size)
}

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

/// The same, and a number alone, which is seconds and may have a fraction: `0.5`.
pub fn read(text: &str) -> Option<Duration> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds = || text.parse().ok().filter(|_| is_number);
    parse(text).or_else(|| Duration::try_from_secs_f64(seconds()?).ok())
}

/// The same length in the largest unit that it is a whole number of.
pub fn format(length: Duration) -> String {
    let seconds = length.as_secs();
    let (unit, size) = UNITS.iter().find(|(_, size)| seconds.is_multiple_of(*size)).unwrap_or(&UNITS[3]);
    format!("{}{unit}", seconds / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_take_units_and_seconds() {
        let read = |text| read(text).map(|age| age.as_millis());
        for (text, seconds) in [("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86_400), ("90", 90), ("0", 0)]
        {
            assert_eq!(read(text), Some(seconds * 1000), "{text}");
        }
        assert_eq!(read("0.5"), Some(500));
        let longest = "9".repeat(400);
        for text in
            ["", "s", ".", "-1", "-1s", "+1", "1e3", "inf", "nan", "1.5m", "5 m", "5min", "1h30m", &longest]
        {
            assert_eq!(read(text), None, "{text}");
        }
    }
}

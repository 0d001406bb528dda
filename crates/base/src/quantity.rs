//! Sizes as Kubernetes writes them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes written as a Kubernetes quantity: `10Gi`, `1.5Mi`, `500M`, `4096`, `1e9`.
///
/// See the `resource.Quantity` type of the Kubernetes API. Sub-byte values (`100m`) and negative
/// ones are refused: they cannot be the size of anything here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity(pub u64);

/// A string that is not a size.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a size: write a whole number of bytes such as 4096, 64Ki, 10Gi or 1.5Ti")]
pub struct QuantityError {
    text: String,
}

/// Multipliers by suffix, the binary ones before their one-letter relatives.
const SUFFIXES: [(&str, u64); 13] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("Ei", 1 << 60),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000),
    ("", 1),
];

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        parse(text).map(Quantity).ok_or_else(|| QuantityError { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<u64> {
    let (number, unit) =
        SUFFIXES.iter().find_map(|(suffix, unit)| text.strip_suffix(suffix).map(|number| (number, *unit)))?;
    let (number, exponent) = match number.split_once(['e', 'E']) {
        Some((number, exponent)) => (number, exponent.parse::<u32>().ok()?),
        None => (number, 0),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return None;
    }
    let scale = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let mantissa: u128 = format!("{whole}{fraction}").parse().ok()?;
    let scaled = mantissa.checked_mul(u128::from(unit))?.checked_mul(10u128.checked_pow(exponent)?)?;
    if scaled % scale != 0 {
        return None;
    }
    u64::try_from(scaled / scale).ok()
}

impl fmt::Display for Quantity {
    /// The shortest exact form with a binary suffix.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (suffix, unit) in SUFFIXES[..6].iter().rev() {
            if self.0 != 0 && self.0.is_multiple_of(*unit) {
                return write!(f, "{}{suffix}", self.0 / unit);
            }
        }
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubernetes_sizes_parse() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4Ki", 4096),
            ("1.5Mi", 3 << 19),
            (".5Gi", 1 << 29),
            ("32Ti", 32 << 40),
            ("500M", 500_000_000),
            ("1e9", 1_000_000_000),
            ("2E3", 2000),
            ("7E", 7_000_000_000_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(Quantity(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_its_text() {
        for text in ["", "-1", "1.2.3", "100m", "1.0001", "Gi", "1GiB", "16Ei", "1e99", "0x10", " 1"] {
            let error = text.parse::<Quantity>().expect_err(text);
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn display_is_exact_and_short() {
        for (bytes, text) in [(0, "0"), (1, "1"), (1 << 30, "1Gi"), (3 << 19, "1536Ki"), (1 << 60, "1Ei")] {
            assert_eq!(Quantity(bytes).to_string(), text);
        }
    }
}

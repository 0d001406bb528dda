//! Where a page begins, in the designs that page.

/// A number, which anyone may choose, or what a page said of the next one. That also names base and target in short, so that
/// it is not taken for a page of two others.
#[derive(Debug, PartialEq, Eq)]
pub struct PageToken {
    number: u64,
    of: Option<u64>,
}

impl PageToken {
    /// The text for the page that begins with this number.
    pub fn next(number: u64, base: Option<&str>, target: &str) -> String {
        format!("{number}-{:016x}", short_name(base, target))
    }

    /// `None` where the text is not a place.
    pub fn parse(text: &str) -> Option<Self> {
        let number =
            |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?;
        match text.split_once('-') {
            None => Some(PageToken { number: number(text)?, of: None }),
            Some((digits, of)) => {
                let is_hex = of.len() == 16 && of.bytes().all(|byte| byte.is_ascii_hexdigit());
                let of = u64::from_str_radix(of, 16).ok().filter(|_| is_hex)?;
                Some(PageToken { number: number(digits)?, of: Some(of) })
            }
        }
    }

    /// The number; `None` where the place is in a list of two others.
    pub fn number_in(&self, base: Option<&str>, target: &str) -> Option<u64> {
        self.of.is_none_or(|of| of == short_name(base, target)).then_some(self.number)
    }

    /// The number, whatever pair it is of.
    pub fn number(&self) -> u64 {
        self.number
    }
}

/// Identifies a pair of snapshots. It protects against mistakes, not against attackers.
fn short_name(base: Option<&str>, target: &str) -> u64 {
    let mut hasher = blake3::Hasher::new();
    // With its length, or two pairs could be one text; no base is not an empty one.
    hasher.update(&base.map_or(u64::MAX, |base| base.len() as u64).to_le_bytes());
    hasher.update(base.unwrap_or_default().as_bytes()).update(target.as_bytes());
    let mut short = [0; 8];
    hasher.finalize_xof().fill(&mut short);
    u64::from_le_bytes(short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_of_one_pair() {
        let next = PageToken::next(8192, Some("b"), "t");
        let place = PageToken::parse(&next).expect("a place");
        assert_eq!(place.number_in(Some("b"), "t"), Some(8192));
        for (base, target) in [
            (Some("b"), "u"),
            (Some("c"), "t"),
            (None, "t"),
            (None, "bt"),
            (Some(""), "bt"),
            (Some("bt"), ""),
        ] {
            assert_eq!(place.number_in(base, target), None, "{base:?} {target}");
        }
        let number = PageToken::parse("18446744073709551615").expect("a number");
        assert_eq!(number.number_in(None, "t"), Some(u64::MAX));
        for wrong in [
            "18446744073709551616",
            "",
            "-1",
            "+1",
            "8192-",
            "8192-12",
            "8192-xyzxyzxyzxyzxyzx",
            "a-0123456789abcdef",
        ] {
            assert_eq!(PageToken::parse(wrong), None, "{wrong:?}");
        }
    }
}

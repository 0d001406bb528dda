//! Numbers that look random and are the same in every run and release: one for each seed and place.

/// SplitMix64's finalizer, over both.
pub(crate) fn at(seed: u64, place: u64) -> u64 {
    let mut mixed = (seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The same for a name.
pub(crate) fn of(seed: u64, name: &str) -> u64 {
    name.bytes().fold(at(seed, 0), |so_far, byte| at(so_far, u64::from(byte)))
}

/// From 0 up to 1.
pub(crate) fn share(seed: u64, place: u64) -> f64 {
    (at(seed, place) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_spread_and_repeat() {
        let below = (0..10_000).filter(|place| share(7, *place) < 0.1).count();
        assert!((900..1100).contains(&below), "{below}");
        assert_eq!(share(7, 3), share(7, 3));
        assert_ne!(share(7, 3), share(8, 3));
        assert_ne!(of(1, "a"), of(1, "b"));
    }
}

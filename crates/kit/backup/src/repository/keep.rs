//! Which backups the rules of a prune keep. Pure.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::About;
use crate::arguments::Keep;

/// The ids of the backups that are kept. Pure.
pub fn kept(backups: &[About], keep: Keep) -> BTreeSet<String> {
    let Keep { last, daily, weekly, monthly, yearly } = keep;
    let is_all = [last, daily, weekly, monthly, yearly].iter().all(Option::is_none);
    let mut kept = BTreeSet::new();
    let mut volumes: BTreeMap<&str, Vec<&About>> = BTreeMap::new();
    for about in backups {
        volumes.entry(&about.volume).or_default().push(about);
    }
    for backups in volumes.values_mut() {
        // Ids ascend, also where the clock went back.
        backups.sort_by_key(|about| std::cmp::Reverse(&about.id));
        let day = |about: &About| {
            Timestamp::from_second(about.created).unwrap_or_default().to_zoned(TimeZone::UTC).date()
        };
        let mut first_of = |limit: Option<u16>, name: &dyn Fn(&About) -> (i64, i64)| {
            let mut seen = BTreeSet::new();
            for about in backups.iter() {
                if seen.len() < usize::from(limit.unwrap_or(0)) && seen.insert(name(about)) {
                    kept.insert(about.id.clone());
                }
            }
        };
        first_of(daily, &|about| (day(about).year().into(), day(about).day_of_year().into()));
        first_of(monthly, &|about| (day(about).year().into(), day(about).month().into()));
        first_of(yearly, &|about| (day(about).year().into(), 0));
        first_of(weekly, &|about| {
            let week = day(about).iso_week_date();
            (week.year().into(), week.week().into())
        });
        let last = if is_all { backups.len() } else { usize::from(last.unwrap_or(0)) };
        kept.extend(backups.iter().take(last).map(|about| about.id.clone()));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(volume: &str, time: &str) -> About {
        About {
            id: time.to_owned(),
            volume: volume.to_owned(),
            created: time.parse::<Timestamp>().expect("a time").as_second(),
            ..About::default()
        }
    }

    #[test]
    fn what_is_kept_is_the_last_of_its_day_or_week_and_the_last_ones() {
        // Sunday the 4th and Monday the 5th of January 2026 are of two weeks; the year begins in week 1.
        let times = [
            "2025-12-28T10:00:00Z",
            "2025-12-29T10:00:00Z",
            "2026-01-04T10:00:00Z",
            "2026-01-04T22:00:00Z",
            "2026-01-05T10:00:00Z",
            "2026-01-06T09:00:00Z",
            "2026-01-06T10:00:00Z",
        ];
        let backups: Vec<About> = times.iter().map(|time| about("a", time)).collect();
        let keeps = |keep: Keep, wanted: &[usize]| {
            let kept = kept(&backups, keep);
            let wanted: BTreeSet<String> = wanted.iter().map(|place| times[*place].to_owned()).collect();
            assert_eq!(kept, wanted, "{keep:?}");
        };
        let case = |last, daily, weekly, wanted: &[usize]| {
            keeps(Keep { last, daily, weekly, ..Keep::default() }, wanted);
        };
        keeps(Keep { monthly: Some(2), ..Keep::default() }, &[6, 1]);
        keeps(Keep { yearly: Some(5), ..Keep::default() }, &[6, 1]);
        keeps(Keep { monthly: Some(1), daily: Some(2), ..Keep::default() }, &[6, 4]);
        case(None, None, None, &[0, 1, 2, 3, 4, 5, 6]);
        case(Some(1), None, None, &[6]);
        case(Some(0), None, None, &[]);
        case(None, Some(2), None, &[6, 4]);
        case(None, Some(9), None, &[6, 4, 3, 1, 0]);
        case(None, None, Some(2), &[6, 3]);
        case(None, None, Some(3), &[6, 3, 0]);
        case(Some(2), Some(1), Some(2), &[6, 5, 3]);
        let both = [about("a", times[0]), about("b", times[1])];
        assert_eq!(kept(&both, Keep { last: Some(1), ..Keep::default() }).len(), 2, "each volume by itself");
    }
}

//! The names of objects: which are ours, and that of a backup, which says when it began.

use super::Repository;
use super::pack::PackRef;
use crate::error::{Result, refused};

impl Repository {
    /// An id that comes after all others, and whether the clock is behind the last of them. Ids in `partial` count too: some are of
    /// backups that are being made.
    pub fn next_id(&self, now: jiff::Timestamp) -> Result<(String, Option<String>)> {
        let ids = self.names("backups")?.into_iter().chain(self.names("partial")?);
        let last = ids.filter_map(|id| Some((time_of(&id)?, id))).max_by_key(|(time, _)| *time);
        let after =
            |time: jiff::Timestamp| time.checked_add(jiff::Span::new().milliseconds(1)).unwrap_or(time);
        let time = last.as_ref().map_or(now, |(last, _)| now.max(after(*last)));
        let id = format!("{}-{}", time.strftime("%Y%m%dT%H%M%S%.3fZ"), random_digits(6)?);
        // Clocks of several machines differ a little.
        let behind = last.filter(|(last, _)| last.duration_since(now) > jiff::SignedDuration::from_secs(60));
        Ok((id, behind.map(|(_, id)| id)))
    }
}

/// Whether a text is so many hexadecimal digits.
pub fn are_digits(text: &str, count: usize) -> bool {
    text.len() == count && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether this is the name of an object of ours. Any other in the directory, or in the bucket, is somebody else's.
pub fn is_ours(name: &str) -> bool {
    let is_id = |id: &str| {
        time_of(id).is_some() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
    };
    match name.split('/').collect::<Vec<_>>()[..] {
        ["packs", dir, pack] => are_digits(pack, 64) && dir == &pack[..2],
        ["backups" | "partial" | "damaged", id] => is_id(id),
        ["locks", id] => are_digits(id, 16),
        [name] => name == super::CONFIG,
        _ => false,
    }
}

/// The time in an id, where it has one.
pub fn time_of(id: &str) -> Option<jiff::Timestamp> {
    let (time, _) = id.rsplit_once('-')?;
    jiff::Timestamp::strptime("%Y%m%dT%H%M%S%.fZ%z", format!("{time}+0000")).ok()
}

/// Where a pack lies.
pub fn pack_name(pack: &PackRef) -> String {
    let name = pack.name();
    format!("packs/{}/{name}", &name[..2])
}

/// Random hexadecimal digits.
pub fn random_digits(count: usize) -> Result<String> {
    let mut bytes = vec![0; count.div_ceil(2)];
    getrandom::fill(&mut bytes).map_err(|error| refused!("no random numbers: {error}"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()[..count].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repository::tests::{open, runtime};

    #[test]
    fn every_id_comes_after_all_others() {
        let dir = tempfile::tempdir().expect("temp dir");
        let runtime = runtime();
        let repository = open(dir.path(), &runtime);
        let mut ids: Vec<String> = Vec::new();
        for seconds in [1_800_000_000, 1_900_000_000, 1_800_000_000, 0, 253_402_207_199, 5] {
            let now = jiff::Timestamp::from_second(seconds).expect("a time");
            let (id, behind) = repository.next_id(now).expect("an id");
            assert_eq!(
                behind.is_some(),
                ids.last().is_some_and(|last| time_of(last).expect("a time") >= now)
            );
            repository.store.replace(&format!("backups/{id}"), Vec::new()).expect("write");
            // What others put there is no backup.
            repository.store.replace("backups/zzz-1", Vec::new()).expect("write");
            ids.push(id);
        }
        assert_eq!(repository.ids().expect("ids"), ids);
    }
}

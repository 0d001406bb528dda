//! Whether a driver's answers are right: judged by what was written, never by the driver's word.

use std::path::PathBuf;

use csi_client::{Options, Question};

use crate::conformance::answer::{Answer, missing, name};
use crate::conformance::case::Wrong;
use crate::conformance::content::{Content, blocking};
use crate::conformance::plugin::Plugin;
use crate::conformance::ranges::Ranges;

/// Volumes up to this size are read from end to end; of larger ones what holds data, and places that are spread over the rest.
const WHOLE: u64 = 4 << 30;
/// How many such places of 1 MiB.
const SPREAD: u64 = 1024;

/// Reads a stream to its end.
pub(super) async fn stream(plugin: &Plugin, question: &Question) -> Result<Answer, Wrong> {
    let options = Options { secrets: plugin.stream_secrets(), ..Options::default() };
    let opened = plugin.client().open_stream(question, &options).await;
    Answer::read_all(opened, &name(question, &options)).await?.ok(question, &options)
}

/// That the tuples are in order, inside a volume of `size` bytes, and hold every byte of `must`. The bytes that they name.
pub(super) fn judge(answer: &Answer, what: &str, must: &Ranges, size: u64) -> Result<u64, Wrong> {
    let bytes = |value: i64| u64::try_from(value).ok();
    let mut end = 0;
    for (offset, length) in answer.tuples() {
        let place = bytes(offset).zip(bytes(length).filter(|length| *length > 0));
        let place = place.filter(|(offset, _)| *offset >= end);
        let Some((offset, length)) = place.filter(|(offset, _)| *offset < size) else {
            let text = format!(
                "the tuple ({offset}, {length}) overlaps the one before, is out of order, or is outside of the volume"
            );
            return Err(Wrong::new(text));
        };
        end = offset.saturating_add(length);
    }
    if let Some(capacity) = answer.capacity()
        && bytes(capacity).is_none_or(|capacity| capacity < size)
    {
        let text = format!("volume_capacity_bytes is {capacity}, and the volume has {size} bytes");
        return Err(Wrong::new(text));
    }
    let listed = answer.ranges();
    missing(what, must, &listed)?;
    Ok(listed.bytes())
}

/// That a device holds what was written.
pub(super) async fn holds(content: Content, device: PathBuf, size: u64) -> Result<(), Wrong> {
    blocking(move |stop| match size <= WHOLE {
        true => content.compare(&device, size, stop),
        false => content.compare_parts(&device, size, SPREAD, stop),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use csi_client::Message;

    /// Small volumes from end to end; of large ones what holds data, and some of the rest.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_device_that_holds_something_else_is_seen() {
        use crate::conformance::content::{BLOCK, Edit};
        use std::fs::File;
        let dir = tempfile::tempdir().expect("temp dir");
        for size in [1 << 30, 1 << 40] {
            let path = dir.path().join("device");
            File::create(&path).and_then(|file| file.set_len(size)).expect("make a file");
            let stop = base::Stop::default();
            let mut content = Content::new();
            let edits = [Edit::Write { start: 5000, count: 3, seed: 1 }];
            content.apply(&path, &edits, &stop).expect("write");
            holds(content.clone(), path.clone(), size).await.expect("as written");
            // What was written is something else, or there is something where nothing was written.
            for start in [5002, 0] {
                let mut other = content.clone();
                other.apply(&path, &[Edit::Write { start, count: 1, seed: 2 }], &stop).expect("write");
                let error = holds(content.clone(), path.clone(), size).await.expect_err("another");
                assert!(error.to_string().contains(&format!("byte {}", start * BLOCK)), "{error}");
                let back =
                    [Edit::Write { start: 5002, count: 1, seed: 1 }, Edit::Zero { start: 0, count: 1 }];
                other.apply(&path, &back, &stop).expect("write");
            }
            std::fs::remove_file(&path).expect("remove");
        }
    }

    #[test]
    fn an_answer_that_loses_or_invents_is_seen() {
        let answer = |capacity: i64, tuples: &[(i64, i64)]| Answer {
            messages: vec![Message { style: 2, capacity, tuples: tuples.to_vec() }],
            end: Ok(()),
        };
        let must = Ranges::of([0..4096, 8192..12288]);
        let judged = |capacity, tuples: &[(i64, i64)]| {
            judge(&answer(capacity, tuples), "changed", &must, 65536).map_err(|wrong| wrong.to_string())
        };
        assert_eq!(judged(65536, &[(0, 4096), (8192, 8192)]), Ok(12288));
        for (capacity, tuples, expected) in [
            (65536, &[(0, 4096)][..], "4096 bytes changed are in no tuple, the first at 8192"),
            (65536, &[(8192, 4096), (0, 4096)], "out of order"),
            (65536, &[(0, 8192), (4096, 8192)], "overlaps"),
            (65536, &[(0, 4096), (8192, 4096), (65536, 4096)], "outside"),
            (65536, &[(-4096, 16384)], "outside"),
            (65536, &[(0, 0), (0, 12288)], "overlaps"),
            (32768, &[(0, 12288)], "volume_capacity_bytes is 32768"),
        ] {
            let error = judged(capacity, tuples).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
        // Empty answers that end with OK have no capacity to judge.
        assert!(judge(&Answer { messages: vec![], end: Ok(()) }, "changed", &must, 65536).is_err());
    }
}

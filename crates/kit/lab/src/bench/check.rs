//! Whether a driver's answers are right: judged by what was written, never by the driver's word.

use std::path::PathBuf;

use csi_client::{Message, Options, Question};
use proto::BlockMetadataType;

use crate::conformance::answer::{Answer, missing, name};
use crate::conformance::content::{Content, blocking};
use crate::conformance::plugin::Plugin;
use crate::conformance::ranges::Ranges;
use crate::conformance::verdict::Wrong;

/// Volumes up to this size are read from end to end; of larger ones what holds data, and places that are spread over the rest.
const WHOLE: u64 = 4 << 30;
/// How many such places of 1 MiB.
const SPREAD: u64 = 1024;

/// Reads a stream to its end.
pub(super) async fn stream(plugin: &Plugin, question: &Question) -> Result<Answer, Wrong> {
    let options = Options { secrets: plugin.stream_secrets(), ..Options::default() };
    let opened = plugin.client().open_stream(question, &options).await;
    Answer::read(opened, &name(question, &options)).await?.ok(question, &options)
}

/// How large a volume is: by its device, and by the driver's word, which may be less exact.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub device: u64,
    /// `capacity_bytes` of CreateVolume.
    pub told: i64,
}

/// That each message tells the same known type and the capacity of the volume, that the tuples are in order, of one length where
/// the type says so, inside the volume, and hold every byte of `must`. The bytes that they name.
pub(super) fn judge(answer: &Answer, what: &str, must: &Ranges, size: Size) -> Result<u64, Wrong> {
    let wrong = |text: String| Err(Wrong::new(text));
    let style = answer.messages.first().map_or(0, |message| message.style);
    let is_fixed = style == BlockMetadataType::FixedLength as i32;
    for Message { style: told, capacity, .. } in &answer.messages {
        if !is_fixed && *told != BlockMetadataType::VariableLength as i32 {
            return wrong(format!("block_metadata_type is {told}, neither FIXED_LENGTH nor VARIABLE_LENGTH"));
        }
        if *told != style {
            return wrong(format!("block_metadata_type is {told}, and was {style}"));
        }
        let was = answer.capacity().unwrap_or(*capacity);
        if *capacity != was {
            return wrong(format!("volume_capacity_bytes is {capacity}, and was {was}"));
        }
        if *capacity != size.told && u64::try_from(*capacity) != Ok(size.device) {
            let text =
                format!("volume_capacity_bytes is {capacity}, and the volume has {} bytes", size.device);
            return wrong(text);
        }
    }
    let capacity = answer.capacity().unwrap_or(0);
    let (mut end, mut length) = (0, None);
    for (offset, bytes) in answer.tuples() {
        if bytes <= 0 || offset < end || offset >= capacity {
            return wrong(format!(
                "the tuple ({offset}, {bytes}) overlaps the one before, is out of order, empty, or outside of the volume"
            ));
        }
        end = offset.saturating_add(bytes);
        // With a fixed length the last one may reach past a capacity that the length does not divide. None comes after it, for that
        // one would begin outside.
        if end > capacity && !is_fixed {
            return wrong(format!("the tuple ({offset}, {bytes}) passes the capacity, {capacity}"));
        }
        let one = *length.get_or_insert(bytes);
        if is_fixed && bytes != one {
            return wrong(format!("FIXED_LENGTH, but ({offset}, {bytes}) follows tuples of {one} bytes"));
        }
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

    const SIZE: Size = Size { device: 65536, told: 65536 };

    fn must() -> Ranges {
        Ranges::of([0..4096, 8192..12288])
    }

    /// Type, capacity and tuples.
    type Told<'a> = (i32, i64, &'a [(i64, i64)]);

    fn judged(size: Size, messages: &[Told]) -> Result<u64, String> {
        let message = |(style, capacity, tuples): &Told| Message {
            style: *style,
            capacity: *capacity,
            tuples: tuples.to_vec(),
        };
        let answer = Answer { messages: messages.iter().map(message).collect(), end: Ok(()) };
        judge(&answer, "changed", &must(), size).map_err(|wrong| wrong.to_string())
    }

    #[test]
    fn an_answer_that_loses_or_invents_is_seen() {
        assert_eq!(judged(SIZE, &[(2, 65536, &[(0, 4096), (8192, 8192)])]), Ok(12288));
        for (tuples, expected) in [
            (&[(0, 4096)][..], "4096 bytes changed are in no tuple, the first at 8192"),
            (&[(8192, 4096), (0, 4096)], "out of order"),
            (&[(0, 8192), (4096, 8192)], "overlaps"),
            (&[(0, 4096), (8192, 4096), (65536, 4096)], "outside"),
            (&[(0, 12288), (61440, 4608)], "passes the capacity"),
            (&[(-4096, 16384)], "outside"),
            (&[(0, 0), (0, 12288)], "overlaps"),
        ] {
            let error = judged(SIZE, &[(2, 65536, tuples)]).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
        // Empty answers that end with OK have no capacity to judge.
        assert!(judged(SIZE, &[]).is_err());
    }

    #[test]
    fn a_type_and_a_capacity_are_those_of_the_volume_in_every_message() {
        let (first, second): (&[_], &[_]) = (&[(0, 4096)], &[(8192, 4096)]);
        for style in [1, 2] {
            assert_eq!(judged(SIZE, &[(style, 65536, first), (style, 65536, second)]), Ok(8192));
        }
        for (messages, expected) in [
            ([(0, 65536, first), (0, 65536, second)], "block_metadata_type is 0, neither"),
            ([(3, 65536, first), (3, 65536, second)], "block_metadata_type is 3, neither"),
            ([(2, 65536, first), (1, 65536, second)], "block_metadata_type is 1"),
            ([(1, 65536, first), (2, 65536, second)], "block_metadata_type is 2, and was 1"),
            ([(2, 65536, first), (2, 69632, second)], "volume_capacity_bytes is 69632, and was 65536"),
            ([(2, 69632, first), (2, 69632, second)], "volume_capacity_bytes is 69632, and the volume has"),
            ([(2, 32768, first), (2, 32768, second)], "volume_capacity_bytes is 32768, and the volume has"),
            ([(2, -1, first), (2, -1, second)], "volume_capacity_bytes is -1, and the volume has"),
        ] {
            let error = judged(SIZE, &messages).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
        // A device may be larger than what the driver has promised, which may be what it tells again.
        let larger = Size { device: 65536, told: 65000 };
        assert_eq!(judged(larger, &[(2, 65000, &[(0, 12288)])]), Ok(12288));
        assert_eq!(judged(larger, &[(2, 65536, &[(0, 12288)])]), Ok(12288));
    }

    #[test]
    fn the_last_tuple_of_a_fixed_length_may_reach_past_the_capacity() {
        let size = Size { device: 65000, told: 65000 };
        let tuples: &[(i64, i64)] = &[(0, 4096), (8192, 4096), (61440, 4096)];
        assert_eq!(judged(size, &[(1, 65000, tuples)]), Ok(12288));
        let error = judged(size, &[(2, 65000, tuples)]).expect_err("VARIABLE_LENGTH");
        assert!(error.contains("(61440, 4096) passes the capacity, 65000"), "{error}");
        let beyond: &[(i64, i64)] = &[(0, 4096), (8192, 4096), (61440, 4096), (65536, 4096)];
        let error = judged(size, &[(1, 65000, beyond)]).expect_err("one more");
        assert!(error.contains("(65536, 4096)") && error.contains("outside"), "{error}");
        let uneven: &[(i64, i64)] = &[(0, 4096), (8192, 8192)];
        let error = judged(size, &[(1, 65000, uneven)]).expect_err("uneven");
        assert!(error.contains("FIXED_LENGTH, but (8192, 8192)"), "{error}");
    }
}

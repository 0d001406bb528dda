//! What is measured: a volume's life from its creation to its deletion, with everything that is known of it checked on the way.

use base::Quantity;
use csi_client::Question;

use super::figures::{Spot, Unit};
use super::steps::{Bench, Lived, Over};
use crate::random;

impl Bench<'_> {
    /// All that is planned. What went wrong apart from the figures, and what could not be taken away.
    pub async fn measure(&mut self, troubles: &mut Vec<String>, left: &mut Vec<String>) {
        for size in &self.plan.sizes {
            for run in 1..=self.plan.runs {
                let place = format!("{}, run {run} of {}", Quantity(*size), self.plan.runs);
                self.progress.part(&place);
                let lived = self.life(*size, run).await;
                if !self.end(&place, lived, troubles, left).await {
                    break;
                }
            }
        }
        if let Some(size) = self.plan.sizes.first().filter(|_| !self.plan.snapshots.is_empty()) {
            let place = format!("{}, many snapshots", Quantity(*size));
            self.progress.part(&place);
            let grown = self.growth(*size).await;
            self.end(&place, grown, troubles, left).await;
        }
    }

    /// Takes away what a life has made. Whether another one is worth trying.
    async fn end(
        &mut self,
        place: &str,
        lived: Lived<()>,
        troubles: &mut Vec<String>,
        left: &mut Vec<String>,
    ) -> bool {
        if let Err(Over::Trouble(wrong)) = &lived {
            troubles.push(format!("{place}: {wrong}"));
        }
        let still = self.plugin.clean_up(self.plan.patience).await;
        for thing in still {
            if !left.contains(&thing) {
                left.push(thing);
            }
        }
        lived.is_ok() && left.is_empty()
    }

    /// One run on a volume of one size.
    async fn life(&mut self, size: u64, run: u64) -> Lived<()> {
        let seed = random::at(size, run);
        self.progress.step("CreateVolume");
        let create = self.spot("create", "CreateVolume", size);
        let at_first = self.space_at_first().await;
        let mut subject = self.subject(size, seed, Some(&create)).await?;
        let real_size = subject.size;

        // Snapshots and their metadata.
        let first = self.spot("snapshot-first", "CreateSnapshot, the first", size);
        let copied = "a copy of the data to another sparse file, synced";
        if let Some(bare) = &subject.bare {
            self.book.bare(&first, copied, bare.copy("base").await?);
        }
        let mut last = self.snapshot(&subject, &first).await?;
        // Not before: some filesystems count what is written only once a snapshot, or time, has made them commit.
        let with_data = self.space(Some(&subject.volume)).await;
        let allocated = self.spot("allocated", "GetMetadataAllocated of it", size);
        if let Some(bare) = &subject.bare {
            self.book.bare(&allocated, "SEEK_DATA and SEEK_HOLE over a file", bare.walk().await?);
        }
        let question = Question::Allocated { snapshot: last.id.clone() };
        self.ask(&allocated, question, "with data", &last.content.data(), real_size).await?;

        let mut snaps = vec![last.clone()];
        for percent in self.plan.changed.clone() {
            self.change(&mut subject, percent).await?;
            let what = format!("CreateSnapshot after {percent} % changed");
            let spot = self.spot(&format!("snapshot-{percent}"), &what, size);
            let at_once = self.delta_spot(percent, false, size);
            if let Some(bare) = &subject.bare {
                let changed = subject.content.changed_since(&last.content);
                let read = bare.read_both("base", &changed).await?;
                self.book.bare(&spot, copied, bare.copy("base").await?);
                self.book.bare(&at_once, "reading what changed in both files", read);
            }
            let taken = self.snapshot(&subject, &spot).await?;
            let listed = self.delta(&at_once, &last, &taken, real_size).await?;
            let what = format!("delta of {percent} %: bytes listed for each that changed");
            let spot = self.spot(&format!("listed-{percent}"), &what, size);
            if let Some(listed) = listed {
                self.book.sample(&spot, listed);
            }
            last = taken;
            snaps.push(last.clone());
        }
        let with_snapshots = self.space(Some(&subject.volume)).await;
        if self.plugin.claims.metadata {
            tokio::time::sleep(self.plan.settle).await;
        }
        for (at, percent) in self.plan.changed.clone().into_iter().enumerate() {
            let later = self.delta_spot(percent, true, size);
            let (base, target) = (snaps[at].clone(), snaps[at + 1].clone());
            self.delta(&later, &base, &target, real_size).await?;
        }

        // Copies, which must hold what was written; the restored snapshot is not the last, so the volume has changed since.
        let (from, spot_of_it) = match self.plan.changed.len().checked_sub(2) {
            Some(at) => (&snaps[at + 1], format!("snapshot-{}", self.plan.changed[at])),
            None => (&snaps[0], "snapshot-first".to_owned()),
        };
        let restore = self.spot("restore", "CreateVolume from a snapshot", size);
        let source = csi_client::from_snapshot(&from.id);
        if let Some(bare) = &subject.bare {
            self.book.bare(&restore, copied, bare.copy("copy").await?);
            bare.remove("copy").await?;
        }
        let right = self.copy(&restore, source, &from.content, real_size.device).await?;
        if !right {
            // Whichever of the two calls is at fault.
            let spot = Spot { id: spot_of_it, ..restore.clone() };
            self.book.wrong(&spot, "the volume that is restored from it does not hold what was written");
        }
        let with_restored = self.space(Some(&subject.volume)).await;
        let clone = self.spot("clone", "CreateVolume from a volume", size);
        if self.plugin.claims.clone {
            if let Some(bare) = &subject.bare {
                self.book.bare(&clone, copied, bare.copy("copy").await?);
                bare.remove("copy").await?;
            }
            let source = csi_client::from_volume(&subject.volume.id);
            self.copy(&clone, source, &subject.content.clone(), real_size.device).await?;
        } else {
            self.progress.step(&clone.what);
            self.book.left_out(&clone, "the driver does not claim CLONE_VOLUME");
        }
        let with_clone = self.space(Some(&subject.volume)).await;

        // What it takes.
        let data = Quantity(self.plan.data);
        let pairs = [
            ("space-data", "space of the data and its first snapshot", at_first.zip(with_data)),
            ("space-snapshots", "space of the further snapshots", with_data.zip(with_snapshots)),
            ("space-restored", "space of the restored volume", with_snapshots.zip(with_restored)),
            ("space-clone", "space of the clone", with_restored.zip(with_clone)),
        ];
        let taken = pairs.each_ref().map(|(_, _, space)| space.map(|(before, after)| before - after));
        for (id, what, space) in pairs {
            let spot = self.spot(id, what, size);
            match space {
                None => {
                    self.book.no_figure(&spot, "the driver does not claim GET_CAPACITY, does not answer it, or never says the same twice: --space-dir needs no answer")
                }
                Some(_) if !follows(data.0 as f64, taken) => {
                    let taken = taken.map(|taken| taken.map_or("?".to_owned(), |taken| Unit::Bytes.text(taken)));
                    let why = format!(
                        "what is left does not follow what is written: {data} of data, and {} taken",
                        taken.join(", ")
                    );
                    self.book.no_figure(&spot, why);
                }
                Some(_) if id == "space-clone" && !self.plugin.claims.clone => {
                    self.book.no_figure(&spot, "the driver does not claim CLONE_VOLUME");
                }
                Some((before, after)) => self.book.sample(&spot, before - after),
            }
        }

        // Deletion.
        let delete = self.spot("delete-snapshot", "DeleteSnapshot", size);
        if let Some(bare) = &subject.bare {
            self.book.bare(&delete, "unlink of a copy, synced", bare.remove("base").await?);
        }
        for snap in snaps.iter().rev() {
            self.progress.message(&delete.what);
            match self.timed(self.plugin.delete_snapshot(&snap.id)).await {
                Ok(((), took)) => self.book.sample(&delete, took),
                Err(wrong) => {
                    self.book.failed(&delete, wrong);
                    return Err(Over::Noted);
                }
            }
        }
        self.progress.step(&delete.what);
        self.quietly(self.plugin.detach(&subject.volume.id)).await?;
        let delete = self.spot("delete-volume", "DeleteVolume", size);
        if let Some(bare) = &subject.bare {
            self.book.bare(&delete, "unlink of the file, synced", bare.remove("volume").await?);
        }
        self.step(&delete, self.plugin.delete_volume(&subject.volume.id)).await?;
        drop(subject);
        self.writes(size, seed).await
    }

    fn delta_spot(&self, percent: f64, later: bool, size: u64) -> Spot {
        let (id, what) = match later {
            false => {
                (format!("delta-{percent}-at-once"), format!("GetMetadataDelta of {percent} %, at once"))
            }
            true => (format!("delta-{percent}-later"), format!("GetMetadataDelta of {percent} %, later")),
        };
        self.spot(&id, &what, size)
    }
}

/// Whether the bytes that each step took follow what it wrote: `data` bytes at first, and the later steps give none back. Where others
/// write and delete on the same disk they do not.
fn follows(data: f64, taken: [Option<f64>; 4]) -> bool {
    let is_written = taken[0].is_none_or(|taken| taken >= data / 2.0);
    is_written && taken.into_iter().flatten().all(|taken| taken > -data / 16.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_that_others_take_and_give_back_is_no_figure() {
        let space = |taken: [f64; 4]| taken.map(Some);
        assert!(follows(64.0, space([64.0, 8.0, 0.1, -0.1])));
        assert!(follows(64.0, [None; 4]));
        assert!(!follows(64.0, space([10.0, 8.0, 0.0, 0.0])), "others gave back");
        assert!(!follows(64.0, space([64.0, 8.0, -140.0, 0.0])), "others gave back later");
    }
}

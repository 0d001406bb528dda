//! What a volume's snapshots cost where it has many.

use tonic::Code;

use super::figures::Spot;
use super::steps::{Bench, Lived, Snap};
use crate::random;

/// Per cent that change before a snapshot, where the number of snapshots is what is looked at.
const GROWTH: f64 = 1.0;

impl Bench<'_> {
    /// What a volume's snapshots cost where it has many.
    pub async fn growth(&mut self, size: u64) -> Lived<()> {
        let mut subject = self.subject(size, random::at(size, 0), None).await?;
        let mut first: Option<Snap> = None;
        let mut last: Option<Snap> = None;
        let mut there = 0;
        for count in self.plan.snapshots.clone() {
            while there < count {
                self.progress.step(&format!("snapshot {} of {count}", there + 1));
                if there > 0 {
                    self.change(&mut subject, 0.01).await?;
                }
                let making = self.timed(self.plugin.create_snapshot(&subject.volume.id)).await;
                let id = match making {
                    Ok((id, _)) => id,
                    Err(wrong) if wrong.code() == Some(Code::ResourceExhausted) => {
                        let spot = self.spot("many-snapshot", "CreateSnapshot after 1 % changed", size);
                        self.book.left_out(&Spot { snapshots: Some(count), ..spot }, wrong);
                        return Ok(());
                    }
                    Err(wrong) => return Err(wrong.at(&format!("snapshot {}", there + 1)).into()),
                };
                let taken = Snap { id, content: subject.content.clone() };
                first.get_or_insert_with(|| taken.clone());
                last = Some(taken);
                there += 1;
            }
            let spot = |bench: &Self, id: &str, what: &str| Spot {
                snapshots: Some(count),
                ..bench.spot(id, what, size)
            };
            let take = spot(self, "many-snapshot", "CreateSnapshot after 1 % changed");
            let since_last = spot(self, "many-delta-last", "GetMetadataDelta from the one before");
            let since_first = spot(self, "many-delta-first", "GetMetadataDelta from the first");
            let restore = spot(self, "many-restore", "CreateVolume from a snapshot");
            let delete = spot(self, "many-delete", "DeleteSnapshot");
            for _ in 0..self.plan.runs {
                let (Some(oldest), Some(base)) = (&first, &last) else { return Ok(()) };
                self.change(&mut subject, GROWTH).await?;
                let taken = self.snapshot(&subject, &take).await?;
                self.delta(&since_last, base, &taken, subject.size).await?;
                self.delta(&since_first, oldest, &taken, subject.size).await?;
                let source = csi_client::from_snapshot(&taken.id);
                self.copy(&restore, source, &taken.content, subject.size.device).await?;
                // The new one takes the place of the one before, so that there are as many in each run.
                self.step(&delete, self.plugin.delete_snapshot(&base.id)).await?;
                if oldest.id == base.id {
                    first = Some(taken.clone());
                }
                last = Some(taken);
            }
        }
        Ok(())
    }
}

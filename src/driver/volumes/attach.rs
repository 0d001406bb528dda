//! Attaching volumes to the node (`ControllerPublishVolume`), behind `--enable-attach`.
//!
//! The volume's file is on one node, so nothing needs to be done on another machine. An attachment is an entry in the
//! volume's `state.json`. It records how the volume may be used, and prevents its deletion.

use crate::driver::error::{Error, Result, shown};
use crate::driver::request::capability::Capability;
use crate::driver::volumes::capacity::Reservation;
use crate::driver::volumes::make::Volumes;
use crate::store::{Attached, VolumeRecord};

/// A ControllerPublishVolume call, with the fields of its message.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct AttachRequest {
    pub volume_id: String,
    pub node_id: String,
    pub capability: Capability,
    pub read_only: bool,
}

impl Volumes {
    /// The nodes that a volume is attached to.
    pub fn attached_nodes(&self, record: &VolumeRecord) -> Vec<String> {
        self.shared.attachment(record).map(|attached| attached.node_id.clone()).into_iter().collect()
    }
    /// Attaches a volume to this node. Succeeds if it is attached already.
    pub fn attach(&self, request: &AttachRequest) -> Result<()> {
        if request.node_id.is_empty() {
            return Err(Error::Missing { field: "node_id" });
        }
        let record = self.shared.lock_volume(&request.volume_id)?;
        if request.node_id != self.shared.config.node_id {
            return Err(Error::NotFound { kind: "node", id: shown(&request.node_id) });
        }
        let attached = Attached {
            node_id: request.node_id.clone(),
            access: request.capability.kind_for(&record)?,
            mode: request.capability.mode.name().to_owned(),
            read_only: request.read_only,
        };
        match &record.attached {
            Some(existing) if *existing == attached => return Ok(()),
            Some(existing) if existing.node_id != attached.node_id => {
                return Err(Error::Precondition(format!(
                    "volume {} is attached to node {}: call ControllerUnpublishVolume for it first",
                    record.id, existing.node_id
                )));
            }
            Some(_) => {
                return Err(Error::Clash {
                    kind: "attachment of volume",
                    name: record.id.to_string(),
                    difference: "another capability or readonly flag".into(),
                    remedy: "detach it first",
                });
            }
            None => {}
        }
        let _slot = self.take_slot()?;
        Ok(self.shared.store.change_volume_state(&record.id, |state| state.attached = Some(attached))?)
    }

    /// Detaches a volume from this node, or from all nodes if `node_id` is empty. Succeeds if it is not attached. A volume that
    /// is still staged stays staged, and that alone prevents its deletion.
    pub fn detach(&self, volume_id: &str, node_id: &str) -> Result<()> {
        let record = match self.shared.lock_volume(volume_id) {
            Err(Error::NotFound { .. }) => return Ok(()),
            locked => locked?,
        };
        // Compared with the record, not with our node id, which may have been another when it was attached.
        let is_attached =
            record.attached.as_ref().is_some_and(|there| node_id.is_empty() || node_id == there.node_id);
        if !is_attached {
            return Ok(());
        }
        Ok(self.shared.store.change_volume_state(&record.id, |state| state.attached = None)?)
    }

    /// Reserves one of the attachments that `--max-volumes-per-node` allows, until it is recorded. So two concurrent calls
    /// cannot both take the last one.
    fn take_slot(&self) -> Result<Reservation<'_>> {
        let most = u64::from(self.shared.config.max_volumes);
        self.attaching.take(1, |taken| {
            let attached = self
                .shared
                .store
                .read(|index| index.volumes_after(None).filter(|record| record.attached.is_some()).count());
            match most != 0 && attached as u64 + taken >= most {
                true => Err(Error::Exhausted(format!(
                    "{most} volumes are attached to node {} (--max-volumes-per-node): detach one first",
                    self.shared.config.node_id
                ))),
                false => Ok(()),
            }
        })
    }
}

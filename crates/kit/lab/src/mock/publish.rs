//! Published volumes: files and directories that agree with the streams.

use std::path::Path;

use proto::*;
use tonic::Status;

use super::data;
use super::driver::Driver;
use super::state::{missing, required};

/// The most data that a published volume is written with.
const PUBLISHED: u64 = 4 << 30;

impl Driver {
    /// Makes the target: of a Block volume a file with what the volume holds, of a Filesystem volume a directory.
    pub fn publish(&self, request: &NodePublishVolumeRequest) -> Result<NodePublishVolumeResponse, Status> {
        required("target_path", &request.target_path)?;
        let capability = request.volume_capability.as_ref().ok_or_else(|| missing("volume_capability"))?;
        let (capacity, history) = {
            let state = self.state();
            let volume = state.volume(&request.volume_id)?;
            (volume.capacity, volume.history.clone())
        };
        let target = Path::new(&request.target_path);
        let failed = |error: std::io::Error| Status::internal(format!("make {}: {error}", target.display()));
        let is_mount = matches!(capability.access_type, Some(volume_capability::AccessType::Mount(_)));
        if is_mount {
            std::fs::create_dir_all(target).map_err(failed)?;
            return Ok(NodePublishVolumeResponse::default());
        }
        let block_size = self.settings.block_size;
        let most = (PUBLISHED / block_size) as usize;
        if data::Blocks::new(&history, 0).take(most + 1).count() > most {
            return Err(Status::resource_exhausted(format!(
                "{} holds more than {PUBLISHED} bytes of data",
                request.volume_id
            )));
        }
        // Made next to it, so that what is there is whole.
        let draft = target.with_extension("draft");
        let file = std::fs::File::create(&draft).map_err(failed)?;
        file.set_len(capacity).map_err(failed)?;
        data::write(&file, &history, block_size, capacity).map_err(failed)?;
        std::fs::rename(&draft, target).map_err(failed)?;
        Ok(NodePublishVolumeResponse::default())
    }

    pub fn unpublish(
        &self,
        request: &NodeUnpublishVolumeRequest,
    ) -> Result<NodeUnpublishVolumeResponse, Status> {
        required("volume_id", &request.volume_id)?;
        required("target_path", &request.target_path)?;
        let target = Path::new(&request.target_path);
        let removed =
            if target.is_dir() { std::fs::remove_dir(target) } else { std::fs::remove_file(target) };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Status::internal(format!("remove {}: {error}", target.display())))
            }
            _ => Ok(NodeUnpublishVolumeResponse::default()),
        }
    }
}

//! The driver as a server in front of it sees it: what it is called, and whether it is ready.

use std::path::Path;
use std::time::Duration;

use proto::answers::Checked;
use proto::identity_client::IdentityClient;
use proto::{GetPluginInfoRequest, ProbeRequest};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often the driver is asked.
const EVERY: Duration = Duration::from_secs(1);

/// A connection to the socket at `path`. It is made when it is used, and made again when it was lost.
pub fn lazy_channel(path: &Path) -> Checked {
    Checked(crate::endpoint().connect_with_connector_lazy(crate::connector(path.to_owned())))
}

/// The driver's name, as soon as it answers. The log says why it does not, once for each reason.
pub async fn name(channel: &Checked) -> String {
    let mut identity = IdentityClient::new(channel.clone());
    let mut logged = String::new();
    loop {
        let asked = tokio::time::timeout(PATIENCE, identity.get_plugin_info(GetPluginInfoRequest {})).await;
        let reason = match asked {
            Ok(Ok(info)) => return info.into_inner().name,
            Ok(Err(status)) => status.message().to_owned(),
            Err(_) => format!("no answer within {} s", PATIENCE.as_secs()),
        };
        if reason != logged {
            tracing::warn!(reason, "the CSI driver does not answer yet");
            logged = reason;
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Says whether the driver is there and ready, once a second until it is dropped.
pub async fn watch(channel: &Checked, tell: impl Fn(bool)) {
    let mut identity = IdentityClient::new(channel.clone());
    loop {
        let probe = tokio::time::timeout(PATIENCE, identity.probe(ProbeRequest {})).await;
        // A driver that says nothing about itself is ready (CSI spec, "Probe").
        tell(matches!(probe, Ok(Ok(answer)) if answer.get_ref().ready != Some(false)));
        tokio::time::sleep(EVERY).await;
    }
}

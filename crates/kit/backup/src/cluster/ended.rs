//! How the pod of a run ended: by its status, and by what its container says in the end.

use serde_json::Value;

use super::{PODS, Run, tell, text};
use crate::error::{Error, Result, refused};
use crate::repository::About;

/// How a pod ended that did not fail by itself.
pub(super) enum Ended {
    Made(Box<About>),
    /// Its memory was used up, or its node was drained: the description of it.
    Killed(String),
}

impl Run<'_> {
    /// Waits until the pod has ended.
    pub(super) async fn finished(&self) -> Result<Ended> {
        let mut has_started = false;
        self.until(PODS, &self.name, |pod, is_late| {
            let status = "/status/containerStatuses/0/state";
            let message = text(pod, &format!("{status}/terminated/message")).unwrap_or_default();
            match text(pod, "/status/phase") {
                Some("Succeeded") => Some(serde_json::from_str(message).map(Ended::Made).map_err(|error| {
                    refused!(
                        "the backup is made, and the report of pod {} cannot be read: {error}",
                        self.name
                    )
                })),
                Some("Failed") => {
                    let why = [message, text(pod, "/status/message").unwrap_or_default()].join(" ");
                    let code = pod.data.pointer(&format!("{status}/terminated/exitCode"));
                    // By SIGTERM, which cbt-backup answers with 130, or SIGKILL. A pod that is evicted may have no code.
                    let is_killed = code.is_some_and(|code| [130, 137, 143].iter().any(|by| code == by))
                        || matches!(text(pod, "/status/reason"), Some("Evicted" | "Terminated"));
                    let code = code.map_or_else(|| "?".to_owned(), ToString::to_string);
                    let why = format!("pod {} failed with exit code {code}: {}", self.name, why.trim());
                    Some(if is_killed { Ok(Ended::Killed(why)) } else { Err(Error::refused(why)) })
                }
                Some("Running") if !has_started => {
                    has_started = true;
                    tell(&format!("pod {} runs", self.name));
                    None
                }
                Some("Running") => None,
                _ if is_late => {
                    let condition = pod.data.pointer("/status/conditions").and_then(Value::as_array);
                    let waits = condition.into_iter().flatten().rfind(|of| of["status"] == "False");
                    let why = text(pod, &format!("{status}/waiting/message"))
                        .or_else(|| waits.and_then(|of| of["message"].as_str()))
                        .unwrap_or("the scheduler says nothing");
                    Some(Err(refused!(
                        "pod {} does not start in {} s: {why}",
                        self.name,
                        self.arguments.patience.as_secs_f64()
                    )))
                }
                _ => None,
            }
        })
        .await
    }
}

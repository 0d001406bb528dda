//! Calls that outlive the driver: one that was under way when it was stopped or killed is made again, as a sidecar
//! would.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::Failed;
use testkit::prelude::*;

/// How long a call may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The way to the driver that serves now.
pub struct Link {
    client: Mutex<Client>,
    /// Even while a driver serves; the next number each time that changes.
    generation: watch::Sender<u64>,
}

impl Link {
    pub fn new(client: Client) -> Self {
        Link { client: Mutex::new(client), generation: watch::channel(0).0 }
    }

    /// Says that the driver is about to go.
    pub fn down(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Says that another one serves.
    pub fn up(&self, client: Client) {
        *self.client.lock().expect("client") = client;
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Makes a call: again while another call is at work on the object, and where the driver went meanwhile.
    /// Every other error is one.
    pub async fn call<T, F>(&self, what: &str, make: impl Fn(Client) -> F) -> Result<T, Failed>
    where
        F: Future<Output = csi_client::Result<T>>,
    {
        let mut watch = self.generation.subscribe();
        let mut since = Instant::now();
        loop {
            let generation =
                *watch.wait_for(|generation| generation.is_multiple_of(2)).await.expect("it is never closed");
            let client = self.client.lock().expect("client").clone();
            let answer = match tokio::time::timeout(PATIENCE, make(client)).await {
                Ok(answer) => answer,
                Err(_) => return Err(format!("{what}: no answer in {} s", PATIENCE.as_secs())),
            };
            let went = *self.generation.borrow() != generation;
            match answer {
                Ok(answer) => return Ok(answer),
                Err(_) if went => since = Instant::now(),
                Err(error) if error.code() == Code::Aborted && since.elapsed() < PATIENCE => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => return Err(format!("{what}: {:?}: {}", error.code(), error.status.message())),
            }
        }
    }
}

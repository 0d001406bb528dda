//! The nodes' addresses from the EndpointSlices of a headless Service, watched. Who answers at an address is not decided
//! here: a node says it by its certificate.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, reflector};
use kube::{Api, Client};

use crate::NodeService;
use crate::nodes::Nodes;

/// How long a watch lasts before it is begun again: a dead connection is noticed in this time.
const WATCH_SECONDS: u32 = 60;
/// The port that counts, where there are several.
const PORT: &str = "router";

/// Gives `nodes` the addresses of the Service's slices, for ever. While the API server does not answer, and while all slices
/// are listed again, the last addresses count.
pub async fn follow(client: Client, service: NodeService, nodes: Arc<Nodes>) {
    let api: Api<EndpointSlice> = Api::namespaced(client, &service.namespace);
    let of_service = format!("kubernetes.io/service-name={}", service.name);
    let config = watcher::Config { timeout: Some(WATCH_SECONDS), ..watcher::Config::default() };
    let events = watcher::watcher(api, config.labels(&of_service))
        .modify(|slice: &mut EndpointSlice| slice.metadata.managed_fields = None)
        .default_backoff();
    let (known, writer) = reflector::store();
    let mut events = reflector::reflector(writer, events).boxed();
    let mut before = None;
    loop {
        match events.try_next().await {
            Ok(Some(Event::Init | Event::InitApply(_))) => continue,
            Ok(Some(_)) => {}
            // The stream of a watcher has no end.
            Ok(None) => return,
            Err(error) => {
                let error = base::report(&error);
                tracing::warn!(
                    error,
                    "the EndpointSlices cannot be watched now: the last addresses are kept"
                );
                continue;
            }
        }
        let now = addresses(&known.state());
        if before.as_ref() != Some(&now) {
            let (service, count) = (&service.name, now.len());
            match count {
                0 => tracing::warn!(service, "the Service has no addresses of nodes"),
                _ => tracing::info!(service, count, "addresses of nodes"),
            }
            nodes.set_addresses(&now);
            before = Some(now);
        }
    }
}

/// One address for each pod: the first, as the contract of EndpointSlices has it, of IPv4 where there are both. A pod that is
/// not ready counts too, since its volumes are where it is.
fn addresses(slices: &[Arc<EndpointSlice>]) -> BTreeSet<String> {
    let mut by_pod: BTreeMap<String, (IpAddr, u16)> = BTreeMap::new();
    for slice in slices {
        let Some(port) = port(slice) else { continue };
        for endpoint in slice.endpoints.iter().flatten() {
            let Some(address) = endpoint.addresses.first().and_then(|first| first.parse::<IpAddr>().ok())
            else {
                continue;
            };
            let pod = endpoint.target_ref.as_ref();
            let pod = pod.and_then(|pod| pod.uid.clone().or_else(|| pod.name.clone()));
            let found = by_pod.entry(pod.unwrap_or_else(|| address.to_string())).or_insert((address, port));
            *found = (*found).min((address, port));
        }
    }
    by_pod
        .into_values()
        .map(|(address, port)| std::net::SocketAddr::from((address, port)).to_string())
        .collect()
}

fn port(slice: &EndpointSlice) -> Option<u16> {
    let ports = slice.ports.as_deref().unwrap_or_default();
    let port = match ports {
        [only] => Some(only),
        several => several.iter().find(|port| port.name.as_deref() == Some(PORT)),
    };
    let number = port.and_then(|port| u16::try_from(port.port?).ok());
    if number.is_none() && slice.endpoints.iter().flatten().next().is_some() {
        let slice = slice.metadata.name.as_deref();
        tracing::warn!(slice, "an EndpointSlice has several ports and none is named {PORT}: it is not used");
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(kind: &str, ports: &[(&str, i32)], endpoints: &[(&str, &str)]) -> Arc<EndpointSlice> {
        let ports: Vec<_> =
            ports.iter().map(|(name, port)| serde_json::json!({"name": name, "port": port})).collect();
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|(pod, address)| {
                let target = (!pod.is_empty()).then(|| serde_json::json!({"kind": "Pod", "uid": pod}));
                serde_json::json!({"addresses": [address], "conditions": {"ready": false}, "targetRef": target})
            })
            .collect();
        let slice = serde_json::json!({
            "metadata": {"name": "s"}, "addressType": kind, "ports": ports, "endpoints": endpoints,
        });
        Arc::new(serde_json::from_value(slice).expect("a slice"))
    }

    #[test]
    fn each_pod_has_one_address_and_the_port_of_the_router() {
        let only = [("", 9811)];
        let both = [("metrics", 1), ("router", 2)];
        for (slices, expected) in [
            (vec![], &[][..]),
            (
                vec![slice("IPv4", &only, &[("a", "10.0.0.1"), ("b", "10.0.0.2")])],
                &["10.0.0.1:9811", "10.0.0.2:9811"],
            ),
            (vec![slice("IPv4", &both, &[("a", "10.0.0.1")])], &["10.0.0.1:2"]),
            (vec![slice("IPv4", &[("x", 1), ("y", 2)], &[("a", "10.0.0.1")])], &[]),
            (
                vec![
                    slice("IPv6", &only, &[("a", "fd00::1"), ("b", "fd00::2")]),
                    slice("IPv4", &only, &[("a", "10.0.0.1")]),
                ],
                &["10.0.0.1:9811", "[fd00::2]:9811"],
            ),
            // Written by hand, without pods.
            (
                vec![slice("IPv4", &only, &[("", "10.0.0.1"), ("", "10.0.0.2")])],
                &["10.0.0.1:9811", "10.0.0.2:9811"],
            ),
            (vec![slice("FQDN", &only, &[("a", "node.test")])], &[]),
        ] {
            let expected: BTreeSet<String> = expected.iter().map(|address| (*address).to_owned()).collect();
            assert_eq!(addresses(&slices), expected);
        }
    }
}

//! Promise: the API server is asked as little as can be, and a moment without it is survived.

use std::path::{Path, PathBuf};

use tonic::Code;

use crate::world::{World, code, eventually};

pub async fn a_warm_call_asks_the_api_server_nothing_and_a_cold_one_twice(world: World) {
    let (_driver, ns, token) = world.with_snapshots(&[("first", "plain-1"), ("second", "plain-2")]).await;
    let (_gateway, mut client) = world.served(&[]).await;
    let user = format!("system:serviceaccount:{ns}:gateway");
    let asked = async || {
        let calls = world.api.calls_of(&user).await;
        // Watches and their lists are for no call in particular.
        calls
            .into_iter()
            .filter(|(call, _)| call.starts_with("create") || call.starts_with("get "))
            .collect::<Vec<_>>()
    };
    assert_eq!(asked().await, []);
    assert_eq!(code(&client.allocated(&token, &ns, "second").await), Code::Ok);
    let review = |kind: &str, times| (format!("create {kind}"), times);
    let cold = vec![review("subjectaccessreviews", 1), review("tokenreviews", 1)];
    assert_eq!(asked().await, cold);
    for _ in 0..50 {
        assert_eq!(code(&client.allocated(&token, &ns, "second").await), Code::Ok);
    }
    assert_eq!(asked().await, cold, "a warm call asks nothing");
    // A delta looks at its base too: one right more, once.
    for _ in 0..50 {
        assert_eq!(code(&client.delta(&token, &ns, "plain-1", "second").await), Code::Ok);
    }
    assert_eq!(asked().await, [review("subjectaccessreviews", 2), review("tokenreviews", 1)]);
    // Many at once with one new token wait for one review.
    let fresh = world.api.token(&ns, "reader", crate::world::AUDIENCE).await;
    let calls = (0..40).map(|_| {
        let (mut client, fresh, ns) = (client.clone(), fresh.clone(), ns.clone());
        tokio::spawn(async move { code(&client.allocated(&fresh, &ns, "second").await) })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.expect("a call"), Code::Ok);
    }
    assert_eq!(asked().await, [review("subjectaccessreviews", 3), review("tokenreviews", 2)]);
}

/// The API server serves the other tests as well, so this gateway is cut off from it by a kubeconfig that leads through a
/// go-between.
pub async fn calls_go_on_while_the_api_server_is_away(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let config = world.gateway_kubeconfig("gateway").await;
    let (through, bridge) = Bridge::before(&world, &config).await;
    let mut gateway = world.gateway_by(&through, "gateway", &[]);
    gateway.ready().await;
    let mut client = gateway.client().await;
    assert_eq!(code(&client.allocated(&token, &ns, "monday").await), Code::Ok);
    bridge.set(Link::Cut);
    assert_eq!(
        code(&client.allocated(&token, &ns, "monday").await),
        Code::Ok,
        "what is remembered serves on"
    );
    let fresh = world.api.token(&ns, "reader", crate::world::AUDIENCE).await;
    let answer = client.allocated(&fresh, &ns, "monday").await;
    assert_eq!(code(&answer), Code::Unavailable, "{answer:?}");
    world.snapshot(&ns, "tuesday", "plain-2").await;
    bridge.set(Link::Open);
    // The watch begins again by itself; until then a look at the API server helps.
    let served = async || code(&client.allocated(&fresh, &ns, "tuesday").await) == Code::Ok;
    eventually("calls are served again", served).await;
    assert!(gateway.running.is_alive());
}

/// Passes connections on to a port, as long as it is open.
pub struct Bridge {
    port: u16,
    link: tokio::sync::watch::Sender<Link>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Open,
    /// Connections are closed.
    Cut,
    /// Connections stay, and nothing comes through.
    Frozen,
}

impl Bridge {
    /// Before the API server of a kubeconfig: a kubeconfig that leads through it.
    pub async fn before(world: &World, config: &Path) -> (PathBuf, Self) {
        let text = std::fs::read_to_string(config).expect("a kubeconfig");
        let at = text.find("https://127.0.0.1:").expect("an address") + "https://127.0.0.1:".len();
        let digits = text[at..].chars().take_while(char::is_ascii_digit).count();
        let bridge = Bridge::start(text[at..at + digits].parse().expect("a port")).await;
        let through = world.dir.path().join("through.kubeconfig");
        std::fs::write(&through, format!("{}{}{}", &text[..at], bridge.port, &text[at + digits..]))
            .expect("write");
        (through, bridge)
    }

    async fn start(to: u16) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let port = listener.local_addr().expect("address").port();
        let (link, state) = tokio::sync::watch::channel(Link::Open);
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut link = state.clone();
                tokio::spawn(async move {
                    let _ = link.wait_for(|link| *link != Link::Frozen).await;
                    if *link.borrow() == Link::Cut {
                        return;
                    }
                    let Ok(mut far) = tokio::net::TcpStream::connect(("127.0.0.1", to)).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = link.wait_for(|link| *link != Link::Open) => {}
                    }
                    let _ = link.wait_for(|link| *link != Link::Frozen).await;
                });
            }
        });
        Bridge { port, link }
    }

    pub fn set(&self, link: Link) {
        let _ = self.link.send(link);
    }
}

/// Found from outside: where the gateway may not make reviews, its clients were told that the API server does not answer.
pub async fn a_right_that_the_gateway_lacks_is_named(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let (_gateway, mut client) = world.served(&["--review-cache", "0s"]).await;
    assert_eq!(code(&client.allocated(&token, &ns, "monday").await), Code::Ok);
    let roles = world.api.objects("ClusterRole", None);
    let role = format!("{ns}-gateway");
    for (resource, group) in
        [("subjectaccessreviews", "authorization.k8s.io"), ("tokenreviews", "authentication.k8s.io")]
    {
        let mut rules = roles.get(&role).await.expect("the role").data["rules"].clone();
        let names = |rule: &serde_json::Value| {
            rule["resources"].as_array().is_some_and(|all| all.contains(&resource.into()))
        };
        rules.as_array_mut().expect("rules").retain(|rule| !names(rule));
        world.api.merge("ClusterRole", None, &role, serde_json::json!({"rules": rules})).await;
        let missing = format!(
            "this server lacks a right at the Kubernetes API server: User \"system:serviceaccount:{ns}:gateway\" cannot create resource \"{resource}\" in API group \"{group}\" at the cluster scope"
        );
        eventually("the missing right is named", async || {
            let answer = client.clone().allocated(&token, &ns, "monday").await;
            answer == Err((Code::Unavailable, missing.clone()))
        })
        .await;
    }
}

//! Promise: one replica is elected and ready, the others are not; when it is gone another takes over, and a walk goes on where
//! it was.

use crate::driver::{Driver, Volume};
use crate::walk::tuples;
use crate::world::{Program, World};

pub async fn the_replica_that_is_not_elected_is_not_ready_and_takes_over(world: World) {
    let volume = Volume::small();
    let expected = volume.tuples(Some("s0"), "s1", 0).expect("tuples");
    let _driver = Driver::start(&world.driver, &world.csi, volume);
    world.snapshot("monday", "s0").await;
    world.snapshot("tuesday", "s1").await;
    let mut one = world.start(&[]).await;
    let mut two = Program::start(&world, "two", &one.kubeconfig, &[]);
    let token = world.user("user").await;
    world.ask("walk", Some("monday"), "tuesday").await;
    let url = world.url("walk").await;
    let (_, _, first) = one.get(&format!("{url}?maxEntries=1"), Some(&token)).await;
    assert_eq!(tuples(&first), expected[..1]);
    // Only the election is missing.
    while two.readiness().await.1 != "another replica is elected\n" {
        assert_ne!(two.readiness().await.0, 200, "two replicas are ready");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!((two.readiness().await.0, one.readiness().await.0), (503, 200));
    one.kill();
    two.ready().await;
    // The new one writes the status: in a cluster both have the address of one Service.
    let moved = |status: &serde_json::Value| {
        status["callbackURL"].as_str().is_some_and(|url| url.contains(&two.address))
    };
    world.status("walk", "taken over", moved).await;
    let next = first["NextOffset"].as_str().expect("a place");
    let path = format!("/{}/walk?startOffset={next}", world.namespace);
    let (code, _, rest) = two.get(&path, Some(&token)).await;
    assert_eq!((code, tuples(&rest)), (200, expected[1..].to_vec()));
    // An orderly stop ends with 0 and takes the socket away.
    assert!(two.socket.exists());
    assert_eq!(two.stop(), Some(0), "{}", two.log());
    assert!(!two.socket.exists(), "the socket is left behind");
    // What a killed one left behind is no obstacle.
    assert!(one.socket.exists());
    drop(one);
    let again = Program::start(&world, "one", &two.kubeconfig, &[]);
    while again.readiness().await.1 != "another replica is elected\n" {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

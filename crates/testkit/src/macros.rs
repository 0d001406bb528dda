//! What comes before a test: root, a runtime, its cases, and a driver that is started for it. For `#[apply(...)]`.

/// For `#[apply(device_test)]`: a test that attaches devices and calls over sockets. One that takes a `rig: Rig<Xfs>` is given a
/// driver on this pool, which is stopped in order at its end and must leave nothing.
#[macro_export]
macro_rules! device_test {
    ($(#[$attribute:meta])* async fn $name:ident($rig:ident: Rig<$pool:ident>) $body:tt) => {
        $(#[$attribute])*
        #[test_with::root]
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            $crate::with_rig! { $rig, $crate::PoolKind::$pool, $body }
        }
    };
    ($($test:tt)*) => {
        #[test_with::root]
        #[tokio::test(flavor = "multi_thread")]
        $($test)*
    };
}

/// A test between the start of its driver and the end.
#[doc(hidden)]
#[macro_export]
macro_rules! with_rig {
    ($rig:ident, $pool:expr, $body:tt) => {
        #[allow(unused_mut)]
        let mut $rig = $crate::Rig::start($pool).await;
        $body
        $rig.finish();
    };
}

/// The same for each `#[case]`, or for each of the `#[values]`.
#[macro_export]
macro_rules! device_cases {
    ($(#[$case:meta])* async fn $name:ident($rig:ident: Rig<$pool:ident>, $($more:tt)*) $body:tt) => {
        #[rstest::rstest]
        $(#[$case])*
        #[test_with::root]
        #[tokio::test(flavor = "multi_thread")]
        async fn $name($($more)*) {
            $crate::with_rig! { $rig, $crate::PoolKind::$pool, $body }
        }
    };
    ($(#[$case:meta])* async fn $($test:tt)*) => {
        #[rstest::rstest]
        $(#[$case])*
        #[test_with::root]
        #[tokio::test(flavor = "multi_thread")]
        async fn $($test)*
    };
}

/// The same for a test that has a runtime of its own, or several.
#[macro_export]
macro_rules! root_cases {
    ($(#[$case:meta])* fn $($test:tt)*) => {
        #[rstest::rstest]
        $(#[$case])*
        #[test_with::root]
        #[test]
        fn $($test)*
    };
}

/// The same on every pool, the first argument, or what the rig's driver is on (`rig: Rig<pool>`).
#[macro_export]
macro_rules! every_pool {
    ($(#[$attribute:meta])* async fn $name:ident($rig:ident: Rig<$pool:ident> $(, $($more:tt)*)?) $body:tt) => {
        $crate::every_pool! {
            $(#[$attribute])*
            async fn $name($pool: PoolKind $(, $($more)*)?) {
                $crate::with_rig! { $rig, $pool, $body }
            }
        }
    };
    ($(#[$attribute:meta])* async fn $name:ident($pool:ident: PoolKind $(, $($more:tt)*)?) $body:tt) => {
        #[rstest::rstest]
        $(#[$attribute])*
        #[test_with::root]
        #[tokio::test(flavor = "multi_thread")]
        async fn $name(
            #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] $pool: PoolKind,
            $($($more)*)?
        ) $body
    };
}

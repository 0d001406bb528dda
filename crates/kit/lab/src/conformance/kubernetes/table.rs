//! The cases of Kubernetes, in the order they run. Those that are about answers alone are the cases of CSI, with their demands:
//! the messages of both contracts are the same.

use super::super::case::{Case, Level, Run};
use super::super::fixtures::Kind::{Allocated, Delta};
use super::super::{errors, format, offsets, streams, table};
use super::cluster::Cluster;
use super::{access, front};
use Level::{Must, Should};

const OBJECT: &str = "SnapshotMetadataService";
const TLS: &str = "TLS";
const TOKEN: &str = "Authentication";
const RIGHTS: &str = "Authorization";
const CALLS: &str = "SnapshotMetadata API";

/// `own!(name, level, section, requirement, function)`: `function(cluster)`.
macro_rules! own {
    ($name:literal, $level:expr, $section:expr, $requirement:literal, $test:path) => {
        vec![Case {
            name: $name,
            level: $level,
            section: $section,
            requirement: $requirement,
            needs: &[],
            run: |cluster| Box::pin($test(cluster)),
        }]
    };
}

/// `both!(name, function)`: the two cases of CSI of that name, `function(cluster, kind)`.
macro_rules! both {
    ($name:literal, $test:path) => {
        same(&[
            (concat!("allocated-", $name), |cluster| Box::pin($test(cluster, Allocated))),
            (concat!("delta-", $name), |cluster| Box::pin($test(cluster, Delta))),
        ])
    };
}

/// Cases of CSI with what is done here.
fn same(cases: &[(&'static str, Run<Cluster>)]) -> Vec<Case<Cluster>> {
    let all = table::cases();
    let here = |(name, run): &(&'static str, Run<Cluster>)| {
        let case = all.iter().find(|case| case.name == *name)?;
        let (level, section, requirement) = (case.level, case.section, case.requirement);
        Some(Case { name, level, section, requirement, needs: &[], run: *run })
    };
    cases.iter().filter_map(here).collect()
}

/// All cases.
pub(super) fn cases() -> Vec<Case<Cluster>> {
    [
        own!(
            "object-address",
            Must,
            OBJECT,
            "spec.address is a host and a port, and somebody listens there",
            front::address
        ),
        own!(
            "object-audience",
            Must,
            OBJECT,
            "spec.audience says what tokens have to be for",
            front::audience
        ),
        own!(
            "object-ca",
            Must,
            OBJECT,
            "spec.caCert holds certificates in PEM, all of them valid now",
            front::authority
        ),
        own!(
            "tls-certificate",
            Must,
            TLS,
            "the server's certificate is for the address's host, and caCert vouches for it",
            front::certificate
        ),
        own!(
            "tls-old-versions",
            Must,
            TLS,
            "a client that offers nothing later than TLS 1.1 is refused",
            front::old_versions
        ),
        own!("tls-plaintext", Must, TLS, "nothing is served without TLS", front::plaintext),
        both!("served", errors::served),
        own!(
            "client",
            Must,
            OBJECT,
            "a backup tool that looks at the objects finds the service and reads a whole delta",
            access::client
        ),
        both!("order", format::order),
        both!("overlap", format::overlap),
        both!("positive-size", format::positive),
        both!("inside", format::inside),
        both!("type-known", format::style_known),
        both!("type-constant", format::style_constant),
        both!("fixed-size", format::fixed_size),
        both!("capacity-constant", format::capacity_constant),
        both!("max-results", format::max_results),
        both!("first-tuple", offsets::first_tuple),
        both!("offset-complete", offsets::complete),
        both!("resume", offsets::resume),
        both!("offset-at-capacity", offsets::at_capacity),
        both!("offset-beyond", offsets::beyond),
        both!("offset-negative", offsets::negative),
        both!("max-results-negative", errors::negative_bound),
        same(&[("delta-reversed", |cluster| Box::pin(errors::reversed(cluster)))]),
        same(&[("delta-same-snapshot", |cluster| Box::pin(errors::same_snapshot(cluster)))]),
        own!(
            "token-missing",
            Must,
            TOKEN,
            "a call without security_token is INVALID_ARGUMENT",
            access::no_token
        ),
        own!("token-garbage", Must, TOKEN, "a text that is not a token is UNAUTHENTICATED", access::garbage),
        own!(
            "token-forged",
            Must,
            TOKEN,
            "a token that the API server did not sign is UNAUTHENTICATED",
            access::forged
        ),
        own!(
            "token-audience",
            Must,
            TOKEN,
            "a token for another audience, or for the API server, is UNAUTHENTICATED",
            access::audience
        ),
        own!(
            "token-revoked",
            Must,
            TOKEN,
            "a token whose object was deleted is UNAUTHENTICATED",
            access::revoked
        ),
        own!("token-expired", Must, TOKEN, "a token that has expired is UNAUTHENTICATED", access::expired),
        own!(
            "rights-none",
            Must,
            RIGHTS,
            "an account without rights is PERMISSION_DENIED",
            access::no_rights
        ),
        own!(
            "rights-list",
            Must,
            RIGHTS,
            "to list and watch VolumeSnapshots is not enough: it takes get",
            access::list_only
        ),
        own!(
            "rights-other-name",
            Must,
            RIGHTS,
            "a right to get another VolumeSnapshot by its name is not enough",
            access::other_name
        ),
        own!(
            "rights-other-namespace",
            Must,
            RIGHTS,
            "rights in another namespace are not enough",
            access::other_namespace
        ),
        own!(
            "rights-by-name",
            Should,
            RIGHTS,
            "a right to get the VolumeSnapshots by their names (resourceNames) is enough",
            access::by_name
        ),
        own!(
            "rights-base",
            Should,
            RIGHTS,
            "a base whose VolumeSnapshot the caller may not get is PERMISSION_DENIED",
            access::base
        ),
        own!(
            "argument-missing",
            Must,
            CALLS,
            "a missing namespace, name or base is INVALID_ARGUMENT",
            access::missing_arguments
        ),
        own!(
            "argument-no-name",
            Must,
            CALLS,
            "a name that no object can have is refused, and leads to no other object",
            access::no_names
        ),
        own!(
            "snapshot-unknown",
            Must,
            CALLS,
            "a VolumeSnapshot that does not exist is NOT_FOUND",
            access::unknown_snapshot
        ),
        own!(
            "snapshot-elsewhere",
            Must,
            CALLS,
            "a VolumeSnapshot of another namespace is NOT_FOUND",
            access::elsewhere
        ),
        own!(
            "snapshot-unready",
            Must,
            CALLS,
            "a VolumeSnapshot that is not ready is UNAVAILABLE",
            access::unready
        ),
        own!("base-unknown", Must, CALLS, "a base of no snapshot is NOT_FOUND", access::unknown_base),
        both!("deadline", streams::deadline),
        both!("cancel", streams::cancel),
        both!("slow-reader", streams::slow_reader),
        both!("concurrent", streams::beside),
        own!(
            "snapshot-new",
            Must,
            CALLS,
            "a VolumeSnapshot without a status, as it is at first, is UNAVAILABLE",
            access::new_snapshot
        ),
        own!("alive", Must, CALLS, "after all of this the service answers as at first", access::alive),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_one_case() {
        let names: Vec<&str> = cases().iter().map(|case| case.name).collect();
        let unique: std::collections::BTreeSet<&&str> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
        // 21 of both streams, two deltas, and those of this side alone: none was lost for its name.
        assert_eq!(names.len(), 2 * 21 + 2 + 27);
    }
}

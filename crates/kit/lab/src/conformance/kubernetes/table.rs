//! The cases of Kubernetes, in the order they run. Those that are about answers alone are the cases of CSI, with their demands:
//! the messages of both contracts are the same.

use super::super::case::{Case, Level, Run};
use super::super::subject::Kind::{Allocated, Delta};
use super::super::{errors, format, offsets, streams, table};
use super::cluster::Cluster;
use super::{access, tls};
use Level::{Must, Should};

const OBJECT: &str = "SnapshotMetadataService";
const TLS: &str = "TLS";
const TOKEN: &str = "Authentication";
const RIGHTS: &str = "Authorization";
const CALLS: &str = "SnapshotMetadata API";

/// A case of this side, `function(cluster)`; the two cases of CSI of that name, `function(cluster, kind)`; or one of them.
macro_rules! case {
    (own $name:literal ($level:ident $section:ident) $test:path => $requirement:literal) => {
        vec![Case::of($name, $level, $section, $requirement, &[], |cluster| Box::pin($test(cluster)))]
    };
    (both $name:literal $test:path) => {
        same(&[
            (concat!("allocated-", $name), |cluster| Box::pin($test(cluster, Allocated))),
            (concat!("delta-", $name), |cluster| Box::pin($test(cluster, Delta))),
        ])
    };
    (same $name:literal $test:path) => {
        same(&[($name, |cluster| Box::pin($test(cluster)))])
    };
}

macro_rules! cases {
    ($($of:ident $name:literal $(($level:ident $section:ident))? $test:path $(=> $requirement:literal)?;)*) => {
        [$(case!($of $name $(($level $section))? $test $(=> $requirement)?)),*].into_iter().flatten().collect()
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

pub(super) fn cases() -> Vec<Case<Cluster>> {
    cases! {
        own "object-address" (Must OBJECT) tls::address =>
            "spec.address is a host and a port, and somebody listens there";
        own "object-audience" (Must OBJECT) tls::audience => "spec.audience says what tokens have to be for";
        own "object-ca" (Must OBJECT) tls::authority =>
            "spec.caCert holds certificates in PEM, all of them valid now";
        own "tls-certificate" (Must TLS) tls::certificate =>
            "the server's certificate is for the address's host, and a CA of caCert signed it";
        own "tls-old-versions" (Must TLS) tls::old_versions =>
            "a client that offers nothing later than TLS 1.1 is refused";
        own "tls-plaintext" (Must TLS) tls::plaintext => "nothing is served without TLS";
        both "served" errors::served;
        own "client" (Must OBJECT) access::client =>
            "a backup tool that looks at the objects finds the service and reads a whole delta";
        both "order" format::order;
        both "overlap" format::overlap;
        both "positive-size" format::positive;
        both "inside" format::inside;
        both "type-known" format::style_known;
        both "type-constant" format::style_constant;
        both "fixed-size" format::fixed_size;
        both "capacity-constant" format::capacity_constant;
        both "max-results" format::max_results;
        both "first-tuple" offsets::first_tuple;
        both "offset-complete" offsets::complete;
        both "resume" offsets::resume;
        both "offset-at-capacity" offsets::at_capacity;
        both "offset-beyond" offsets::beyond;
        both "offset-negative" offsets::negative;
        both "max-results-negative" errors::negative_bound;
        same "delta-reversed" errors::reversed;
        same "delta-same-snapshot" errors::same_snapshot;
        own "token-missing" (Must TOKEN) access::no_token =>
            "a call without security_token is INVALID_ARGUMENT";
        own "token-garbage" (Must TOKEN) access::garbage => "a text that is not a token is UNAUTHENTICATED";
        own "token-forged" (Must TOKEN) access::forged =>
            "a token that the API server did not sign is UNAUTHENTICATED";
        own "token-audience" (Must TOKEN) access::audience =>
            "a token for another audience, or for the API server, is UNAUTHENTICATED";
        own "token-revoked" (Must TOKEN) access::revoked =>
            "a token whose object was deleted is UNAUTHENTICATED";
        own "token-expired" (Must TOKEN) access::expired => "a token that has expired is UNAUTHENTICATED";
        own "rights-none" (Must RIGHTS) access::no_rights => "an account without rights is PERMISSION_DENIED";
        own "rights-list" (Must RIGHTS) access::list_only =>
            "to list and watch VolumeSnapshots is not enough: it takes get";
        own "rights-other-name" (Must RIGHTS) access::other_name =>
            "a right to get another VolumeSnapshot by its name is not enough";
        own "rights-other-namespace" (Must RIGHTS) access::other_namespace =>
            "rights in another namespace are not enough";
        own "rights-by-name" (Should RIGHTS) access::by_name =>
            "a right to get the VolumeSnapshots by their names (resourceNames) is enough";
        own "rights-base" (Should RIGHTS) access::base =>
            "a base whose VolumeSnapshot the caller may not get is PERMISSION_DENIED";
        own "argument-missing" (Must CALLS) access::missing_arguments =>
            "a missing namespace, name or base is INVALID_ARGUMENT";
        own "argument-no-name" (Must CALLS) access::no_names =>
            "a name that no object can have is refused, and leads to no other object";
        own "snapshot-unknown" (Must CALLS) access::unknown_snapshot =>
            "a VolumeSnapshot that does not exist is NOT_FOUND";
        own "snapshot-elsewhere" (Must CALLS) access::elsewhere =>
            "a VolumeSnapshot of another namespace is NOT_FOUND";
        own "snapshot-unready" (Must CALLS) access::unready =>
            "a VolumeSnapshot that is not ready is UNAVAILABLE";
        own "base-unknown" (Must CALLS) access::unknown_base => "a base of no snapshot is NOT_FOUND";
        both "deadline" streams::deadline;
        both "cancel" streams::cancel;
        both "slow-reader" streams::slow_reader;
        both "concurrent" streams::beside;
        own "snapshot-new" (Must CALLS) access::new_snapshot =>
            "a VolumeSnapshot without a status, as it is at first, is UNAVAILABLE";
        own "alive" (Must CALLS) access::alive => "after all of this the service answers as at first";
    }
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

//! The gateway as clients and the cluster see it: the real program, a real API server with real RBAC, CSI drivers on real
//! sockets. One API server serves all tests; each has a namespace, a driver and a gateway of its own.
//!
//! The harness is libtest-mimic, so that the API server ends with the tests.
#![allow(clippy::disallowed_methods)]

mod backup_run;
mod backup_tool;
mod broken_driver;
mod certificates;
mod combinations;
mod community;
mod conformance;
mod cost;
mod crowds;
mod fuzzed;
mod hostile;
mod iterator;
mod library;
mod metrics;
mod rehomed;
mod rights;
mod streams;
mod watches;

use std::process::ExitCode;

use testkit::gateway::{driver, world};

use world::World;

fn main() -> ExitCode {
    let tests = testkit::tests![
        rights::a_caller_gets_what_its_rights_allow,
        rights::a_base_is_a_handle_or_a_name_and_never_a_way_into_another_namespace,
        rights::the_audience_is_the_one_of_the_snapshot_metadata_service,
        rights::objects_that_are_not_whole_get_an_answer,
        rights::tokens_of_every_wrong_kind_are_refused,
        rights::secrets_of_the_class_reach_the_driver,
        rights::rights_that_are_taken_away_end_within_the_time_of_the_cache,
        combinations::every_client_gets_the_same_answer_for_the_same_rights,
        streams::messages_pass_through_as_the_driver_sends_them,
        streams::the_drivers_own_codes_and_messages_pass,
        streams::a_client_that_stops_reading_is_ended_and_disturbs_nobody,
        streams::clients_that_stop_reading_their_sockets_take_a_bounded_memory,
        streams::cancel_and_deadline_reach_the_driver,
        streams::streams_are_bounded_for_all_and_for_each,
        streams::a_stream_outlives_the_deletion_of_its_snapshot,
        streams::a_driver_may_go_and_come_back,
        streams::a_client_that_is_gone_without_a_word_is_noticed,
        streams::a_driver_without_the_service_is_reported,
        streams::a_stop_lets_streams_end,
        cost::a_warm_call_asks_the_api_server_nothing_and_a_cold_one_twice,
        cost::a_right_that_the_gateway_lacks_is_named,
        cost::calls_go_on_while_the_api_server_is_away,
        watches::no_base_is_taken_for_deleted_before_all_contents_are_listed,
        watches::a_gateway_whose_watches_are_not_answered_is_not_ready,
        certificates::the_elected_replica_makes_renews_and_publishes,
        certificates::another_replica_takes_over,
        certificates::an_object_that_a_person_wrote_is_left_alone,
        certificates::the_object_says_whether_a_delta_wants_its_base,
        certificates::files_are_loaded_again_when_they_change,
        certificates::a_certificate_that_has_ended_is_not_ready,
        certificates::a_broken_kubeconfig_is_named_and_not_quoted,
        certificates::a_strangers_lease_does_not_last_for_years,
        metrics::metrics_are_those_of_the_reference_and_fit_the_calls,
        hostile::plaintext_old_tls_and_garbage_are_refused,
        hostile::requests_that_are_too_large_or_too_slow_end,
        fuzzed::requests_of_both_calls_get_the_right_code,
        hostile::requests_of_unknown_callers_take_a_bounded_memory,
        hostile::calls_without_a_body_take_a_bounded_memory_and_keep_nobody_out,
        hostile::a_crowd_of_slow_clients_keeps_nobody_out_and_is_ended,
        broken_driver::a_driver_whose_status_cannot_be_read_is_asked_again,
        broken_driver::a_driver_that_breaks_the_protocol_harms_only_its_own_answer,
        hostile::no_token_and_no_secret_is_written_anywhere,
        hostile::calls_are_served_when_nobody_reads_the_audit,
        crowds::ten_thousand_strangers_keep_nobody_out,
        crowds::an_audit_whose_reader_stops_stops_nothing,
        library::a_client_finds_all_it_needs,
        library::what_is_missing_is_an_error_that_says_what_to_do,
        library::a_gateway_may_go_and_come_back_elsewhere_with_another_authority,
        library::tokens_are_renewed_before_they_end_and_when_they_are_refused,
        library::a_token_in_a_file_is_followed,
        library::an_api_server_that_is_away_does_not_end_a_stream,
        backup_tool::a_backup_outlives_new_tokens_authorities_and_drivers,
        backup_tool::a_backup_whose_token_ends_fails_and_says_so,
        backup_run::run_makes_a_backup_and_leaves_nothing,
        backup_run::run_needs_no_snapshot_where_its_handle_is_enough,
        backup_run::run_cleans_up_after_it_is_interrupted,
        backup_run::run_says_what_is_missing_and_leaves_nothing,
        backup_run::a_plugin_of_kubectl_takes_its_flags,
        community::a_backup_tool_of_the_community_works on "btrfs",
        community::a_backup_tool_of_the_community_works on "xfs",
        community::a_backup_tool_of_the_community_works on "dir",
        community::the_communitys_sidecar_has_the_faults_that_these_tests_look_for,
        community::the_communitys_sidecar_ends_streams_that_are_read_and_the_gateway_does_not,
        rehomed::a_tool_that_takes_snapshots_over_stays_incremental on "btrfs",
        rehomed::a_tool_that_takes_snapshots_over_stays_incremental on "xfs",
        rehomed::a_tool_that_takes_snapshots_over_stays_incremental on "dir",
        iterator::the_communitys_iterator_meets_each_fault_as_the_page_says,
        conformance::the_gateway_passes_every_case_of_kubernetes,
        conformance::every_fault_before_the_gateway_is_seen_by_its_cases,
        conformance::what_the_communitys_sidecar_fails_is_what_the_page_says,
        conformance::an_interrupted_run_leaves_nothing,
        conformance::what_cannot_be_tested_says_why_and_leaves_nothing,
    ];
    testkit::scene::run(tests.into(), &[], World::new)
}

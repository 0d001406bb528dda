//! The earlier designs as users and the cluster see them: the real program, a real API server with real RBAC, CSI drivers on
//! real sockets. One API server serves all tests; each has a namespace, a driver and programs of its own.
//!
//! The harness is libtest-mimic, so that the API server ends with the tests.
#![allow(clippy::disallowed_methods)]

mod aggregated;
mod aggregated_rights;
mod cbt_http;
mod comparison;
mod controller;
mod driver;
mod first_draft;
mod listener;
mod replicas;
mod walk;

use std::process::ExitCode;

use testkit::earlier::{aggregation, world};

use world::World;

const CRDS: [&str; 2] = ["deploy/components/differential/crd.yaml", "deploy/components/aggregated/crd.yaml"];

fn main() -> ExitCode {
    let tests = testkit::tests![
        controller::snapshots_that_exist_give_a_url,
        controller::what_does_not_exist_fails_until_it_does,
        controller::pairs_that_do_not_fit_fail,
        controller::the_status_follows_another_target_and_a_deletion,
        controller::snapshots_that_are_not_ready_are_waited_for,
        controller::bad_specs_are_not_made,
        listener::a_good_token_gets_a_page_and_no_token_gets_403,
        listener::tokens_of_every_wrong_kind_are_refused,
        listener::a_user_gets_what_its_rights_allow,
        listener::bad_requests_get_an_error_that_says_what_is_wrong,
        listener::a_driver_that_is_away_or_broken_is_reported,
        listener::requests_at_once_are_bounded,
        listener::strangers_take_no_places,
        listener::ten_thousand_strangers_keep_nobody_out,
        listener::a_page_that_is_not_taken_keeps_its_place_for_a_time,
        listener::one_user_does_not_take_the_places_of_others,
        walk::a_user_walks_two_pages_with_kubectl,
        walk::pages_together_are_the_stream,
        walk::a_page_begins_where_the_one_before_ended,
        walk::nothing_of_a_walk_reaches_the_api_server,
        replicas::the_replica_that_is_not_elected_is_not_ready_and_takes_over,
        replicas::requests_fail_in_the_readiness_gap_alone,
        replicas::a_walk_of_pages_goes_on_whatever_is_killed,
        replicas::walks_go_on_after_the_api_server_and_etcd_are_killed,
        replicas::requests_of_cbt_http_fail_in_the_readiness_gap_alone,
        comparison::a_cut_connection_ends_the_work_and_the_same_place_goes_on,
        comparison::a_create_that_is_cut_off_ends_at_every_part,
        comparison::a_snapshot_deleted_midway_ends_a_walk_and_a_new_one_is_told_apart,
        comparison::an_index_goes_on_in_another_snapshot_of_the_same_name,
        comparison::silent_clients_are_ended_and_hold_nobody_up,
        comparison::every_test_that_the_page_names_is_there,
        comparison::a_body_that_does_not_come_is_not_waited_for,
        first_draft::changes_between_any_pair_of_snapshots,
        first_draft::changes_from_a_deleted_snapshot_or_all,
        first_draft::the_smallest_change_is_a_device_block_and_block_sizes_vary,
        first_draft::drivers_need_not_serve_it,
        aggregated::kubectl_create_prints_the_answer_page_by_page,
        aggregated::other_versions_of_the_group_keep_working_beside_it,
        aggregated::entries_together_are_the_stream,
        aggregated::limits_are_bounded_and_blocks_are_counted,
        aggregated::nothing_of_it_is_in_etcd,
        aggregated_rights::users_get_what_their_rights_allow,
        aggregated_rights::secrets_are_for_those_who_may_read_them,
        aggregated::mistakes_get_the_errors_that_users_expect,
        aggregated::contents_are_negotiated,
        aggregated_rights::only_the_front_proxy_may_say_who_a_user_is,
        aggregated_rights::each_user_has_a_rate_of_its_own,
        aggregated_rights::creates_have_a_priority_level_of_their_own,
        aggregated::a_walk_goes_on_whatever_is_killed,
        aggregated_rights::data_tokens_are_for_those_who_may_have_data,
        cbt_http::it_publishes_itself_and_its_state_is_reported,
        cbt_http::an_object_that_a_person_wrote_is_left_alone,
        cbt_http::pages_are_for_the_aggregated_server_alone,
        cbt_http::the_call_lists_deltas_as_the_design_says,
        cbt_http::data_is_given_for_good_tokens_alone,
    ];
    testkit::scene::run(tests.into(), &CRDS, World::new)
}

# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: one driver on one node, and what the pages say about it.
# shellcheck disable=SC2154,SC2317

examples_are_all_used() {
    local example
    for example in "$root"/deploy/examples/*.yaml; do
        grep -qE "\b$(basename "$example" .yaml)\b" "$root/hack/e2e.sh" || fail "hack/e2e.sh does not use $example"
    done
}
part_single() {
    examples_are_all_used
    on "$name-a" up
    on "$name-a" install
    say "installing once more changes nothing"
    # A changed object has another generation, a replaced one another uid.
    installed() {
        k get pods,deployments,statefulsets,services,serviceaccounts,roles,rolebindings --namespace "$namespace" \
            --output 'custom-columns=KIND:.kind,NAME:.metadata.name,UID:.metadata.uid,GENERATION:.metadata.generation'
    }
    installed >"$scratch/installed"
    on "$name-a" install
    installed | diff "$scratch/installed" - || fail "installing once more changes objects"
    on "$name-a" exec "$root/hack/e2e.sh" "${e2e_flags[@]}"
    say "the commands of docs/backup-by-hand.md"
    commands_of docs/backup-by-hand.md >"$scratch/backup"
    [ "$(grep -c kubectl "$scratch/backup")" -gt 20 ] || fail "docs/backup-by-hand.md has few commands"
    (cd "$root" && on "$name-a" exec bash -euo pipefail "$scratch/backup") | tee "$scratch/walk"
    grep -qE '^ +268435456 +1048576$' "$scratch/walk" || fail "the walk lists another delta than the page says"
    [ "$(grep -c '^verified: 1073741824 bytes are equal' "$scratch/walk")" -ge 3 ] || fail "not all backups of the walk are verified"
    backup_page
    uninstall 1
    on "$name-a" down
    unchanged
}

# What the tutorial shows, but for its figures, and the file of the second backup after the restore.
tutorial_printed() {
    local text sums
    for text in ': full, ' 'full because there is no earlier backup of default/try-data' ': incremental, ' ' is in /dev/target: ' \
        ' and /dev/target: ' ' compared, equal'; do
        grep -qF "$text" "$root/docs/tutorial-cluster.md" || fail "docs/tutorial-cluster.md does not show \"$text\""
        grep -qF "$text" "$scratch/tutorial" || fail "the commands of docs/tutorial-cluster.md do not print \"$text\""
    done
    sums=$(grep -E '^[0-9a-f]{64}  /data/first$' "$scratch/tutorial") || fail "the commands of docs/tutorial-cluster.md print no checksum"
    [ "$(wc -l <<<"$sums") $(sort -u <<<"$sums" | wc -l)" = "2 1" ] ||
        fail "the restored file is to have the checksum of the second backup, and no other is printed: $sums"
}

# The tutorial and docs/backup.md in a cluster: their commands, as they stand but for where the bucket is.
backup_page() {
    local server page=$scratch/backup-page
    server=$("$root/hack/s3-server.sh")
    mkdir -p "$scratch/s3/backups"
    export AWS_ACCESS_KEY_ID=cluster AWS_SECRET_ACCESS_KEY=cluster-secret AWS_REGION=eu-central-1 \
        AWS_ENDPOINT=http://10.99.0.11:7070 AWS_ALLOW_HTTP=true CBT_BACKUP_REPOSITORY=s3://backups/cluster
    # It ends with the cluster.
    ROOT_ACCESS_KEY_ID=$AWS_ACCESS_KEY_ID ROOT_SECRET_ACCESS_KEY=$AWS_SECRET_ACCESS_KEY \
        on "$name-a" exec "$server" --port 10.99.0.11:7070 --region "$AWS_REGION" --quiet posix "$scratch/s3" &
    tool() { on "$name-a" exec "$root/.deps/image/cbt-backup/cbt-backup" "$@"; }
    # Of the snapshots the base of the next backup stays, for the CRD has no field that says that it need not.
    ours() {
        k get volumesnapshots,persistentvolumeclaims,pods --selector app.kubernetes.io/managed-by=cbt-backup --output json |
            jq -r '.items[] | select(.metadata.annotations["cbt-backup/base"] == null) | .metadata.name'
    }
    nothing_of_ours() { [ -z "$(ours)" ] || fail "$1 leaves: $(ours)"; }
    backups() { # KINDS, the oldest first
        local kinds
        kinds=$(tool list --output json | jq -r '.[].kind' | paste -sd ' ')
        [ "$kinds" = "$1" ] || fail "the backups are $kinds, and are to be $1"
    }
    say "the commands of docs/tutorial-cluster.md, and those of docs/backup.md for a cluster"
    sed 's/\bfiles\b/data/g' "$root/deploy/examples/filesystem.yaml" | k apply --filename -
    k wait --for condition=ready --timeout 120s pod/data
    { commands_of docs/tutorial-cluster.md | grep -v ^hack/ && commands_of docs/backup.md; } |
        sed "/^export/,\$d; s|--from-literal AWS_REGION=|--from-literal AWS_ENDPOINT=$AWS_ENDPOINT --from-literal AWS_ALLOW_HTTP=true &|" >"$page"
    grep '^cbt-backup run' "$page" >"$page-again" || fail "docs/backup.md runs no backup in a cluster"
    (cd "$root" && PATH=$root/.deps/image/cbt-backup:$PATH on "$name-a" exec bash -euxo pipefail "$page") | tee "$scratch/tutorial"
    tutorial_printed
    only_when_asked
    nothing_of_ours "a backup"
    backups full
    k exec data -- sh -c 'dd if=/dev/urandom of=/data/second bs=1M count=4 && sync'
    (cd "$root" && PATH=$root/.deps/image/cbt-backup:$PATH on "$name-a" exec bash -euxo pipefail "$page-again")
    backups "full incremental"
    say "the CronJob of that page, now"
    k create job --from cronjob/cbt-backup-data cbt-backup-now
    k wait --for condition=complete --timeout 180s job/cbt-backup-now
    nothing_of_ours "a backup by the CronJob"
    # Of one day one backup is kept.
    [ "$(tool list --output json | jq length)" = 1 ] || fail "the CronJob does not prune"
    say "a backup that is interrupted, and one that is killed"
    for signal in INT KILL; do
        # shellcheck disable=SC2016
        on "$name-a" exec bash -mc '"$1" run --pvc data --namespace default --secret cbt-backup &
            until kubectl get pod cbt-backup-data >/dev/null 2>&1; do sleep 0.1; done
            kill -"$2" "$!"
            ! wait "$!"' _ "$root/.deps/image/cbt-backup/cbt-backup" "$signal"
        [ "$signal" = INT ] || tool run --pvc data --clean-up
        nothing_of_ours "SIG$signal"
    done
    tool verify
    tool restore latest --volume default/data --to "$scratch/restored"
    for file in first second; do
        [ "$(debugfs -R "cat /$file" "$scratch/restored" 2>/dev/null | sha256sum)" = \
            "$(k exec data -- sha256sum "/data/$file" | sed 's| /.*| -|')" ] || fail "$file is restored with other bytes"
    done
    k delete job cbt-backup-now
    k delete secret cbt-backup
    k delete --filename "$root/deploy/backup/cronjob.yaml"
}

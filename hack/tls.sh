#!/usr/bin/env bash
# Makes a CA and a certificate for csi-snapshot-metadata, puts certificate and key into a Secret and the CA into the
# SnapshotMetadataService object. Neither key is written into this tree; the CA's is thrown away once it has signed.
# Run again, it leaves a certificate that is good for another 30 days alone; --renew makes a new one.
#
# It takes the cluster of kubectl's current context, or of --context.
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: tls.sh [--renew] [--context NAME] [--days N]"
context=() renew=no days=365
while [ $# -gt 0 ]; do
    case "$1" in
        --renew) renew=yes ;;
        --context) context=(--context "${2:?$usage}") && shift ;;
        --days) days=${2:?$usage} && shift ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1; $usage" ;;
    esac
    shift
done
need kubectl openssl

on() { kubectl "${context[@]}" "$@"; }

template=$root/deploy/cbt/snapshotmetadataservice.yaml
secret=deltapath-snapshot-metadata-tls
host=$(sed -n 's/^  address: \(.*\):[0-9]*$/\1/p' "$template")
driver=$(sed -n 's/^  name: //p' "$template")
if [ -z "$host" ] || [ -z "$driver" ]; then fail "$template has no address or no name"; fi

umask 077
dir=$(mktemp -d "${TMPDIR:-/tmp}/deltapath-tls-XXXXXX")
trap 'rm -rf "$dir"' EXIT

# What the cluster has now; empty where there is none.
on get secret "$secret" --namespace "$namespace" --ignore-not-found \
    --output 'jsonpath={.data.tls\.crt}' | base64 -d >"$dir/old.crt"
on get snapshotmetadataservices.cbt.storage.k8s.io "$driver" --ignore-not-found \
    --output 'jsonpath={.spec.caCert}' | base64 -d >"$dir/old-ca.crt"

good() {
    openssl x509 -in "$dir/old.crt" -noout -checkend $((30 * 24 * 3600)) &&
        openssl verify -CAfile "$dir/old-ca.crt" -verify_hostname "$host" "$dir/old.crt"
}
if [ "$renew" = no ] && [ -s "$dir/old.crt" ] && good >/dev/null 2>&1; then
    say "the certificate for $host is good for 30 days and more: left alone (--renew makes a new one)"
    exit 0
fi

say "making a CA and a certificate for $host, good for $days days"
# Names under 64 characters: a longer common name is no valid one.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days "$days" -sha256 \
    -subj "/CN=deltapath snapshot metadata CA" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" \
    -keyout "$dir/ca.key" -out "$dir/ca.crt" 2>"$dir/log" || fail "openssl made no CA: $(cat "$dir/log")"
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -sha256 \
    -subj "/CN=csi-snapshot-metadata" \
    -keyout "$dir/tls.key" -out "$dir/tls.csr" 2>"$dir/log" || fail "openssl made no request: $(cat "$dir/log")"
cat >"$dir/extensions" <<EXTENSIONS
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth
subjectAltName=DNS:$host,DNS:$host.cluster.local
EXTENSIONS
openssl x509 -req -in "$dir/tls.csr" -days "$days" -sha256 -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -CAcreateserial \
    -extfile "$dir/extensions" -out "$dir/tls.crt" 2>"$dir/log" || fail "openssl signed nothing: $(cat "$dir/log")"
rm "$dir/ca.key"

# The CA before stays known until the next renewal: for a minute or so the sidecar still shows the old certificate.
sed -n '/BEGIN CERTIFICATE/,/END CERTIFICATE/p; /END CERTIFICATE/q' "$dir/old-ca.crt" >"$dir/previous.crt"
cat "$dir/ca.crt" "$dir/previous.crt" >"$dir/bundle.crt"

say "writing the SnapshotMetadataService object $driver and the Secret $namespace/$secret"
sed "s|^  caCert: .*|  caCert: $(base64 -w 0 <"$dir/bundle.crt")|" "$template" |
    on apply --server-side --force-conflicts --filename -
on create secret tls "$secret" --namespace "$namespace" --cert "$dir/tls.crt" --key "$dir/tls.key" \
    --dry-run=client --output yaml | on apply --server-side --force-conflicts --filename -

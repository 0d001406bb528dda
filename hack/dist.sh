#!/usr/bin/env bash
# Makes in dist/ all that a release is, of the commit that is checked out, without an image registry:
#
#   deltapath-VERSION-ARCH-linux.tar.gz     the six programs, static, with man pages and completions: x86_64, aarch64
#   deltapath-VERSION-images-x86_64.tar     all images, as one OCI layout
#   deltapath-VERSION.tgz                   the chart, which takes the images from IMAGE_REGISTRY
#   sbom/                                   what is in each program and in each image (CycloneDX)
#   cbt.yaml                                the manifest of `kubectl cbt` for krew
#   RELEASE.md, SHA256SUMS
#
# Times, owners and order come from the commit, and no path of the builder is in it: two builds can be compared, with the same Rust
# and the same packages of Debian.
#
# HOMEPAGE is where the release will be, such as https://github.com/OWNER/deltapath.
#
#   dist.sh          makes it
#   dist.sh push     pushes the images to IMAGE_REGISTRY, such as example.org/team (skopeo's login)
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$root"
out=$root/dist
programs=(deltapath deltapath-gateway deltapath-router cbt-backup cbt-earlier cbt-lab)
# The images, and the stage of the Dockerfile of each.
stages=(deltapath: deltapath-gateway:gateway deltapath-router:router cbt-backup:backup cbt-earlier:earlier cbt-lab:lab)
images=$out/deltapath-$version-images-x86_64.tar
# Registries take small letters alone, and the name of an owner may have others.
registry_of=${IMAGE_REGISTRY:-}
registry_of=${registry_of,,}
name_of() { echo "${registry_of:+$registry_of/}$1:$version"; }

if [ "${1-}" = push ]; then
    [ -n "$registry_of" ] || fail "set IMAGE_REGISTRY"
    need skopeo
    for image in "${stages[@]%%:*}" backup-example; do
        skopeo copy --preserve-digests "oci-archive:$images:$(name_of "$image")" "docker://$(name_of "$image")"
    done
    exit 0
fi
[ $# -eq 0 ] || fail "unknown argument $1"
[ "$(id -u)" -eq 0 ] || fail "needs root"
[ "$(uname -m)" = x86_64 ] || fail "runs on x86_64"
git diff --quiet HEAD || fail "a release is a commit: commit what you changed, or put it away"

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH LC_ALL=C
. hack/buildah.sh
work=$deps/dist
rm -rf "$out" "$work"
mkdir -p "$out/sbom" "$work/target" "$work/source" "$work/scanned"
trap 'b rm --all >/dev/null; rm -rf "$work"' EXIT
context=$work/source
git archive HEAD | tar -x -C "$context"

# The same files give the same archive.
archive() { # FILE DIRECTORY NAME [FLAG...]
    tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=gnu \
        "${@:4}" -C "$2" -c "$3" | case $1 in *gz) gzip -n9 ;; *) cat ;; esac >"$1"
}

# The build stage's image: Debian's linker and certificates, and the toolchain and the crates of this machine, whose own certificates
# are only for cargo: the image of cbt-backup gets Debian's.
rust=docker.io/library/rust:1.90-bookworm
toolchain=$(rustc --print sysroot)
registry=${CARGO_HOME:-$HOME/.cargo}/registry
mkdir -p "$registry"
b rmi --force "$rust" >/dev/null 2>&1 || true
container=$(b from --pull-never "$debian")
b run "$container" -- sh -ec 'apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates gcc libc6-dev >/dev/null'
b config --env PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    --env CARGO_HOME=/usr/local/cargo --env CARGO_HTTP_CAINFO=/usr/local/rust-certs/ca-certificates.crt "$container"
commit "$container" "$rust"

# The source's times are the commit's, so cargo could take what an earlier commit left for its own: its directory is new.
build() { # TAG [FLAG...]
    bud --build-arg OPT_LEVEL="${OPT_LEVEL:-3}" --build-arg LTO="${LTO:-thin}" --build-arg CODEGEN_UNITS="${CODEGEN_UNITS:-4}" \
        --build-arg VERSION="$version" --build-arg REVISION="$(git rev-parse HEAD)" \
        --build-arg COMMIT="$(git log -1 --abbrev=12 --format='%h %cs')" --build-arg IMAGE_REGISTRY="$registry_of" \
        --volume "$toolchain:/usr/local/rust:ro" --volume "$registry:/usr/local/cargo/registry" \
        --volume /etc/ssl/certs:/usr/local/rust-certs:ro --volume "$work/target:/src/target" --timestamp "$SOURCE_DATE_EPOCH" --tag "$@"
}

# The programs that the build stage made for ARCH, in a tarball.
tarball() { # ARCH IMAGE
    local name=deltapath-$version-$1-linux container mounted program
    local dir=$work/$name
    mkdir -p "$dir/bin"
    container=$(b from --pull-never "localhost/$2")
    mounted=$(b mount "$container")
    for program in "${programs[@]}"; do
        install -m 0755 "$(find "$mounted/out" -name "$program" -type f)" "$dir/bin/"
        ! readelf --program-headers "$dir/bin/$program" | grep -q INTERP || fail "$program for $1 is not static"
    done
    b rm "$container" >/dev/null
    # Pages and completions are the same on all machines, and these programs run on this one.
    [ "$1" = x86_64 ] && pages "$dir"
    cp -r "$work/share" "$dir/"
    archive "$out/$name.tar.gz" "$work" "$name"
}
pages() { # DIRECTORY
    local program
    install -m 0644 -D -t "$work/share/doc/deltapath" LICENSE README.md CHANGELOG.md
    mkdir -p "$work/share/bash-completion/completions" "$work/share/zsh/site-functions" "$work/share/fish/vendor_completions.d"
    for program in "${programs[@]}"; do
        "$1/bin/$program" man --out "$work/share/man/man1"
        "$1/bin/$program" completions bash >"$work/share/bash-completion/completions/$program"
        "$1/bin/$program" completions zsh >"$work/share/zsh/site-functions/_$program"
        "$1/bin/$program" completions fish >"$work/share/fish/vendor_completions.d/$program.fish"
    done
}

with_linker() {
    local container
    container=$(b from --pull-never "$rust")
    b run "$container" -- sh -ec 'apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross' >"$deps/build.log" 2>&1 ||
        return 1
    commit "$container" localhost/rust-aarch64
}

say "the programs for x86_64"
build release-x86_64:dist --target build
tarball x86_64 release-x86_64:dist

# Debian's aarch64 tools, and the toolchain's standard library for it.
arm=aarch64-unknown-linux-gnu
[ -d "$toolchain/lib/rustlib/$arm" ] || rustup target add "$arm" 2>/dev/null || true
if ! [ -d "$toolchain/lib/rustlib/$arm" ]; then
    say "no programs for aarch64: Rust has no target $arm here"
elif ! has localhost/rust-aarch64 && ! with_linker; then
    say "no programs for aarch64: gcc-aarch64-linux-gnu cannot be installed"
else
    say "the programs for aarch64"
    build release-aarch64:dist --from localhost/rust-aarch64 --build-arg TARGET=$arm --target build
    tarball aarch64 release-aarch64:dist
fi

say "the images"
for pair in "${stages[@]}"; do
    image=${pair%%:*} stage=${pair#*:}
    build "$image:dist" ${stage:+--target "$stage"}
done
bud_example --timestamp "$SOURCE_DATE_EPOCH" --tag backup-example:dist
for image in "${stages[@]%%:*}" backup-example; do
    b push --quiet "localhost/$image:dist" "oci:$work/images:$(name_of "$image")"
done
archive "$images" "$work/images" .

# As helm has it: the files that symbolic links name, and the directory's name first.
say "the chart"
cp -rL "$context/deploy/chart/deltapath" "$work/chart"
grep -v '^#' "$work/chart/.helmignore" | while read -r ignored; do
    case $ignored in
        */*) rm -r "${work:?}/chart/$ignored" ;;
        *) find "$work/chart" -name "$ignored" -delete ;;
    esac
done
sed -i "s|^  registry: \"\"\$|  registry: \"$registry_of\"|" "$work/chart/values.yaml"
mkdir "$work/packed"
mv "$work/chart" "$work/packed/deltapath"
archive "$out/deltapath-$version.tgz" "$work/packed" deltapath

say "what is in the programs"
cyclonedx=0.5.9
[ -x ".deps/sbom-$cyclonedx/bin/cargo-cyclonedx" ] ||
    cargo install --quiet --locked --root ".deps/sbom-$cyclonedx" "cargo-cyclonedx@$cyclonedx"
(cd "$context" && "$root/.deps/sbom-$cyclonedx/bin/cargo-cyclonedx" cyclonedx --quiet --format json --describe binaries)
for program in "${programs[@]}"; do
    # Paths are those of the repository.
    sed "s|$context|/src|g" "$(find "$context" -name "${program}_bin.cdx.json")" >"$out/sbom/$program.cdx.json"
done

say "what is in the images"
syft=1.57.1
[ -x ".deps/syft-$syft/syft" ] ||
    GOBIN="$root/.deps/syft-$syft" go install "github.com/anchore/syft/cmd/syft@v$syft"
for image in "${stages[@]%%:*}" backup-example; do
    b push --quiet "localhost/$image:dist" "oci:$work/scanned/$image:dist"
    # Neither the day of the scan nor a random number.
    SYFT_FILE_METADATA_SELECTION=none SYFT_CHECK_FOR_APP_UPDATE=false ".deps/syft-$syft/syft" scan --quiet \
        "oci-dir:$work/scanned/$image" --source-name "$image" --source-version "$version" --output cyclonedx-json |
        sed -E 's/"(serialNumber|timestamp)":"[^"]*",//g' >"$out/sbom/$image.image.cdx.json"
done

say "the release text and the checksums"
# The part of this version, or, before its day, what is not released yet.
section() { awk -v name="$1" '/^## /{is_in = index($0, "## [" name "]") == 1; next} /^\[[^]]*\]: /{next} is_in' CHANGELOG.md; }
{
    echo "# deltapath $version"
    text=$(section "$version")
    echo "${text:-$(section Unreleased)}"
} >"$out/RELEASE.md"
cp deploy/krew/cbt.yaml "$out/cbt.yaml"
home=${HOMEPAGE:-https://example.org/deltapath}
sed -i -e 1d -e "s/VERSION/$version/g" -e "s|HOMEPAGE|$home|" -e "s|DOWNLOADS|$home/releases/download/v$version|" "$out/cbt.yaml"
for arch in x86_64 aarch64; do
    if [ -e "$out/deltapath-$version-$arch-linux.tar.gz" ]; then
        digest=$(sha256sum "$out/deltapath-$version-$arch-linux.tar.gz" | cut -d ' ' -f 1)
        sed -i "s/SHA256_$arch/$digest/" "$out/cbt.yaml"
    else
        sed -i "/- uri: .*-$arch-/,/bin:/d" "$out/cbt.yaml"
    fi
done
sums=$(cd "$out" && find . -type f -printf '%P\n' | sort | xargs sha256sum)
tee "$out/SHA256SUMS" <<<"$sums"

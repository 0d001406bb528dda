# The driver and exactly the programs that it calls, for `make image`.
#
# It must run privileged. It attaches loop devices and makes their nodes (CAP_SYS_ADMIN, CAP_MKNOD, and every block
# device allowed), mounts filesystems where kubelet and other pods see them (CAP_SYS_ADMIN, shared propagation),
# freezes them, and grows mounted ones (CAP_SYS_RESOURCE). deploy/base/plugin.yaml grants that to this container alone.
#
# The versions of what is installed are those of hack/deps.sh. What is built depends on Cargo.lock and on nothing
# of the builder: no paths, no times.

FROM rust:1.90-bookworm AS build
ARG SOURCE_DATE_EPOCH=0
# For a release that is only tried: less is optimised, and the build is faster.
ARG OPT_LEVEL=3
ARG LTO=thin
ARG CODEGEN_UNITS=4
ENV CARGO_PROFILE_RELEASE_STRIP=symbols \
    CARGO_PROFILE_RELEASE_OPT_LEVEL=$OPT_LEVEL \
    CARGO_PROFILE_RELEASE_LTO=$LTO \
    CARGO_PROFILE_RELEASE_CODEGEN_UNITS=$CODEGEN_UNITS \
    RUSTFLAGS="--remap-path-prefix=/src=deltapath --remap-path-prefix=/usr/local/cargo=cargo -C target-feature=+crt-static"
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY crates crates
COPY proto proto
COPY src src
COPY benches benches
COPY tests tests
# What --version says, such as "0123abcd4567 2026-01-31".
ARG COMMIT=
# Where the images of a release are, such as example.org/team.
ARG IMAGE_REGISTRY=
# For whom: default, the machine that builds. hack/dist.sh builds for another one too.
ARG TARGET=
ENV CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
# Static files, which need no other. The target is named so that the flag is not for build scripts.
RUN target=${TARGET:-$(rustc -vV | sed -n 's/^host: //p')} \
 && DELTAPATH_COMMIT="$COMMIT" DELTAPATH_IMAGE_REGISTRY="$IMAGE_REGISTRY" cargo build --release --locked --target "$target" --package deltapath --package cbt-lab --package deltapath-gateway \
        --package deltapath-router --package deltapath-earlier --package cbt-backup \
 && cd "target/$target/release" \
 && install -D deltapath /out/deltapath/usr/local/bin/deltapath \
 && install -D cbt-lab /out/cbt-lab/usr/local/bin/cbt-lab \
 && install -D cbt-backup /out/backup/cbt-backup \
 && install -D deltapath-gateway /out/gateway/deltapath-gateway \
 && install -D deltapath-router /out/router/deltapath-router \
 && install -D cbt-earlier /out/earlier/cbt-earlier
# Whom buckets are trusted by.
RUN install -D -m 0644 /etc/ssl/certs/ca-certificates.crt /out/backup/etc/ssl/certs/ca-certificates.crt

# Debian's packages bring more than the driver calls (xfsprogs brings Python), so the programs are taken out of
# them, with the libraries that they are linked to.
FROM debian:bookworm-slim AS programs
ENV PROGRAMS="mkfs.ext4 e2fsck resize2fs e2undo mkfs.xfs xfs_growfs mkfs.btrfs btrfs blkid"
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
        "e2fsprogs=1.47.*" "xfsprogs=6.1.*" "btrfs-progs=6.2*" "util-linux=2.38.*" \
 && for program in $PROGRAMS; do \
        path=$(readlink -f "$(command -v "$program")") \
     && install -D "$path" "/out/usr/sbin/$program" \
     && for library in $(ldd "$path" | grep -o '/[^ ]*'); do \
            install -D "$(readlink -f "$library")" "/out/usr/lib/deltapath/$(basename "$library")" || exit 1; \
        done || exit 1; \
    done \
 && install -D -m 0644 /etc/mke2fs.conf /out/etc/mke2fs.conf \
 && rm -f /out/usr/lib/deltapath/libc.so.* /out/usr/lib/deltapath/ld-linux* /out/usr/lib/deltapath/libm.so.* \
 && install -d /out/etc/ld.so.conf.d && echo /usr/lib/deltapath > /out/etc/ld.so.conf.d/deltapath.conf

# The gateway, for `make gateway-image`: no shell, no libraries, no root.
FROM scratch AS gateway
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="deltapath-gateway" \
      org.opencontainers.image.description="The Kubernetes SnapshotMetadata API in front of any CSI driver" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /out/gateway /
USER 65532:65532
ENTRYPOINT ["/deltapath-gateway"]
CMD ["--help"]

# The router, for `make router-image`, in the same way.
FROM scratch AS router
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="deltapath-router" \
      org.opencontainers.image.description="One CSI controller for many nodes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /out/router /
USER 65532:65532
ENTRYPOINT ["/deltapath-router"]
CMD ["--help"]

# The earlier designs, for `make earlier-image`, in the same way.
FROM scratch AS earlier
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="cbt-earlier" \
      org.opencontainers.image.description="The earlier designs of changed block tracking in Kubernetes, in front of any CSI driver" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /out/earlier /
USER 65532:65532
ENTRYPOINT ["/cbt-earlier"]
CMD ["--help"]

# The backup tool, for `make cbt-backup-image`, in the same way. It opens devices, which are root's.
FROM scratch AS backup
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="cbt-backup" \
      org.opencontainers.image.description="Backs volumes up by their changed blocks" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /out/backup /
ENTRYPOINT ["/cbt-backup"]
CMD ["--help"]

# The conformance suite for any driver, for `make lab-image`: it makes no filesystem.
FROM debian:bookworm-slim AS lab
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="cbt-lab" \
      org.opencontainers.image.description="Tests changed block tracking of any CSI driver" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /out/cbt-lab /
ENTRYPOINT ["/usr/local/bin/cbt-lab"]
CMD ["--help"]

FROM debian:bookworm-slim
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="deltapath" \
      org.opencontainers.image.description="A CSI driver with exact changed block tracking" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=programs /out /
COPY --from=build /out/deltapath /
# Its cache has times and inodes.
RUN ldconfig && rm -f /var/cache/ldconfig/aux-cache
ENTRYPOINT ["/usr/local/bin/deltapath"]
CMD ["driver", "--help"]

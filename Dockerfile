# The driver and exactly the programs it calls. It must run privileged: it attaches loop devices,
# mounts filesystems and freezes them.

FROM rust:1.90-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock build.rs ./
COPY proto proto
COPY src src
COPY benches benches
COPY tests tests
RUN cargo build --release --locked

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="deltapath" \
      org.opencontainers.image.description="A CSI driver with exact changed block tracking" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
 && apt-get install -y --no-install-recommends e2fsprogs xfsprogs btrfs-progs util-linux \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/target/release/deltapath /usr/local/bin/deltapath
ENTRYPOINT ["/usr/local/bin/deltapath"]
CMD ["driver", "--help"]

//! Promise: nobody without a certificate of the cluster gets a byte of a node, and nobody who is not the node of a key gets its
//! calls.

use std::path::Path;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use testkit::{PoolKind, Rig, free_port};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use testkit::cluster::{Authority, Cluster, PATIENCE, eventually, patiently, tls_flags, uri, within};
use testkit::crowd::{Door, Stranger, keeps_nobody_out};

/// A client of HTTP/2 with the certificate of these files, or none. It believes any server.
fn client(files: Option<(&Path, &str)>) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(BelieveAll));
    let mut config = match files {
        None => builder.with_no_client_auth(),
        Some((dir, name)) => {
            let read = |end| std::fs::read(dir.join(format!("{name}.{end}"))).expect("read");
            let chain = CertificateDer::pem_slice_iter(&read("crt")).collect::<Result<_, _>>().expect("PEM");
            let key = PrivateKeyDer::from_pem_slice(&read("key")).expect("PEM");
            builder.with_client_auth_cert(chain, key).expect("a certificate")
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

fn any_name() -> ServerName<'static> {
    ServerName::try_from("node").expect("a name")
}

/// What a client gets of a node beside the handshake: bytes of HTTP/2, or none.
async fn bytes_for(port: u16, files: Option<(&Path, &str)>) -> usize {
    let stream = TcpStream::connect(("127.0.0.1", port)).await.expect("connect");
    let Ok(mut stream) = TlsConnector::from(client(files)).connect(any_name(), stream).await else {
        return 0;
    };
    // The preface and empty settings; the server's own settings are its first bytes.
    let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    let mut answer = [0; 64];
    tokio::time::timeout(PATIENCE, stream.read(&mut answer)).await.expect("an end").unwrap_or(0)
}

#[derive(Debug)]
struct BelieveAll;

impl rustls::client::danger::ServerCertVerifier for BelieveAll {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

#[apply(device_test)]
async fn only_certificates_of_the_cluster_get_a_byte() {
    let cluster = Cluster::start(PoolKind::Dir, 1, &[]).await;
    let (dir, port) = (cluster.dir.path(), cluster.nodes[0].port);
    let own = &cluster.authority;
    own.issue(dir, "again", &uri("router"));
    own.issue(dir, "other-cluster", "spiffe://other.test/deltapath/router");
    own.issue(dir, "no-role", &uri("operator"));
    own.issue(dir, "no-spiffe", "https://cluster.test/deltapath/router");
    // The same name does not make it the same CA.
    Authority::new("the cluster's CA").issue(dir, "other-authority", &uri("router"));
    assert!(bytes_for(port, Some((dir, "router"))).await > 0, "the router gets none");
    assert!(bytes_for(port, Some((dir, "again"))).await > 0, "another router gets none");
    assert_eq!(bytes_for(port, None).await, 0, "without a certificate");
    own.issue(dir, "node-elsewhere", "spiffe://other.test/deltapath/node/0123abcd");
    for name in ["node-elsewhere", "other-cluster", "no-role", "no-spiffe", "other-authority"] {
        assert_eq!(bytes_for(port, Some((dir, name))).await, 0, "with the certificate {name}");
    }
    // A node's gets a refusal, whatever it asks (`transfers.rs` has the rest).
    let node = cluster.nodes[0].name();
    assert!(bytes_for(port, Some((dir, &node))).await > 0, "a node");
    // The node is none the worse for it.
    cluster.volume_on(0, "after").await;
    cluster.finish();
}

#[apply(device_test)]
async fn ten_thousand_strangers_keep_no_router_out() {
    let cluster = Cluster::start(PoolKind::Dir, 1, &[]).await;
    let (dir, port) = (cluster.dir.path(), cluster.nodes[0].port);
    let door = Door { address: ([127, 0, 0, 1], port).into(), config: client(None), name: any_name() };
    let router_is_let_in = async || bytes_for(port, Some((dir, "router"))).await > 0;
    keeps_nobody_out(Stranger::HalfHello, door, router_is_let_in).await;
    cluster.volume_on(0, "after").await;
    cluster.finish();
}

#[apply(device_test)]
async fn a_driver_shows_no_certificate_of_another_data_directory() {
    let dir = tempfile::tempdir().expect("temp dir");
    Authority::new("CA").issue(dir.path(), "wrong", &uri("node/00000000"));
    let mut rig = Rig::start(PoolKind::Dir).await;
    rig.terminate();
    let mut arguments = vec![format!("--router-listen=127.0.0.1:{}", free_port())];
    arguments.extend(tls_flags("router-", dir.path(), "wrong"));
    let ended = testkit::try_command(rig.dir.path(), PoolKind::Dir, &arguments, &[], "info").await;
    assert_eq!(ended.err().and_then(|status| status.code()), Some(1));
    let log = rig.log();
    assert!(log.contains("must have the URI SAN spiffe://CLUSTER/deltapath/node/"), "{log}");
    assert!(log.contains("it has spiffe://cluster.test/deltapath/node/00000000"), "{log}");
    rig.start_again().await;
    rig.finish();
}

/// Another node's driver at the address of one that is known: it takes no call for the other's objects.
#[apply(device_test)]
async fn an_address_that_is_another_nodes_now_gets_no_calls_of_the_one_before() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let volume = cluster.volume_on(0, "kept").await;
    // The second driver listens where the first did.
    let port = cluster.nodes[0].port;
    cluster.nodes[0].rig.terminate();
    cluster.nodes[1].rig.terminate();
    cluster.nodes[1].start_again_with(&[&format!("--router-listen=127.0.0.1:{port}")]).await;
    let mut client = cluster.client();
    // When this is made, the router knows who is at the address now.
    let request = csi_client::new_volume("new", 16 << 20, csi_client::block_capability());
    let request = within(&[cluster.nodes[1].topology()], request);
    let new = patiently!(client.create_volume(request.clone())).expect("CreateVolume");
    assert_eq!(cluster.node_of(&new.volume_id), 1);
    let error = client.delete_volume(&volume).await.expect_err("its node is not there");
    assert_eq!(error.code(), tonic::Code::Unavailable, "{error}");
    cluster.nodes[1].rig.terminate();
    cluster.nodes[0].rig.start_again().await;
    eventually("the first node is back", async || client.delete_volume(&volume).await.is_ok()).await;
    cluster.nodes[1].rig.start_again_with(&[]).await;
    cluster.finish();
}

#[apply(device_test)]
async fn certificates_and_authorities_change_without_a_restart() {
    let cluster = Cluster::start(PoolKind::Dir, 1, &[]).await;
    let (dir, node) = (cluster.dir.path(), cluster.nodes[0].name());
    let role = format!("node/{}", cluster.nodes[0].key);
    let new = Authority::new("the next CA");
    let reloads = |log: &str| log.matches("the new certificate is in use").count();
    let before = reloads(&cluster.nodes[0].rig.log());
    let both = format!("{}{}", cluster.authority.pem, new.pem);
    // Both sides believe both, then each gets a certificate of the new one, then the old one goes.
    for name in ["router", &node] {
        std::fs::write(dir.join(format!("{name}.ca")), &both).expect("write");
    }
    eventually("both have read it", async || {
        reloads(&cluster.router().running.log()) == 1 && reloads(&cluster.nodes[0].rig.log()) > before
    })
    .await;
    new.issue(dir, "router", &uri("router"));
    new.issue(dir, &node, &uri(&role));
    cluster.authority.issue(dir, "old-router", &uri("router"));
    let port = cluster.nodes[0].port;
    eventually("the old CA is worth nothing", async || bytes_for(port, Some((dir, "old-router"))).await == 0)
        .await;
    eventually("the new one is", async || bytes_for(port, Some((dir, "router"))).await > 0).await;
    eventually("the router has read it", async || reloads(&cluster.router().running.log()) >= 2).await;
    // New connections, for streams have their own.
    let volume = cluster.volume_on(0, "after").await;
    let mut client = cluster.client();
    let snapshot = client.create_snapshot("after", &volume).await.expect("CreateSnapshot").snapshot_id;
    client.allocated(&snapshot, 0, 0).await.expect("a stream with the new certificates");
    cluster.finish();
}

//! TLS to a server of gRPC.

use std::sync::Arc;

use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};

/// Trusts these authorities and nothing else.
pub(crate) fn config(authorities: Vec<CertificateDer<'static>>) -> Result<ClientConfig, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// A connection to a place that shows a certificate for `name`. It is made when it is first used, and again when it was lost.
pub(crate) fn channel(
    endpoint: &Endpoint,
    config: ClientConfig,
    name: ServerName<'static>,
    place: (String, u16),
) -> Channel {
    let connector = TlsConnector::from(Arc::new(config));
    endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let (connector, name, place) = (connector.clone(), name.clone(), place.clone());
        async move {
            let stream = TcpStream::connect(place).await?;
            connector.connect(name, stream).await.map(TokioIo::new)
        }
    }))
}

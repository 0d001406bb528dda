//! Where the proxy listens, and the server behind it: a UNIX socket, or a TCP address with or without TLS.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// An address of gRPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Unix(PathBuf),
    Tcp { host: String, port: u16, tls: bool },
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || {
            format!("{text:?} is not an address: write unix:///path, http://host:port or https://host:port")
        };
        let tcp = text.strip_prefix("https://").map(|rest| (rest, true));
        if let Some((rest, tls)) = tcp.or_else(|| text.strip_prefix("http://").map(|rest| (rest, false))) {
            let (host, port) = rest.rsplit_once(':').ok_or_else(wanted)?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let port = port.parse().map_err(|_| wanted())?;
            return match host.is_empty() || host.contains('/') {
                true => Err(wanted()),
                false => Ok(Address::Tcp { host: host.to_owned(), port, tls }),
            };
        }
        let path = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")).unwrap_or(text);
        match path.starts_with('/') {
            true => Ok(Address::Unix(path.into())),
            false => Err(wanted()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix://{}", path.display()),
            Address::Tcp { host, port, tls } => {
                let scheme = if *tls { "https" } else { "http" };
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                write!(f, "{scheme}://{open}{host}{close}:{port}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_printed() {
        for text in
            ["unix:///run/csi.sock", "https://gateway.svc:6443", "http://127.0.0.1:80", "https://[::1]:443"]
        {
            assert_eq!(text.parse::<Address>().expect(text).to_string(), text);
        }
        assert_eq!("/run/csi.sock".parse::<Address>().expect("a path").to_string(), "unix:///run/csi.sock");
        for text in
            ["", "run/csi.sock", "https://host", "https://:1", "https://host:x", "https://a/b:1", "ftp://a:1"]
        {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.contains("unix:///path"), "{error}");
        }
    }
}

//! Errors as people read them.

use std::error::Error;

/// An error and all its causes in one line.
pub fn report(error: &dyn Error) -> String {
    let mut line = words(error);
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = words(error);
        // A transparent wrapper says what its cause says.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line
}

/// What an error says of itself. A status of tonic adds a dump of its cause, which comes in words anyway.
fn words(error: &dyn Error) -> String {
    let text = error.to_string();
    match error.source() {
        Some(cause) => text.replace(&format!(", source: {cause:?}"), ""),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("message: \"lost\", source: {0:?}")]
    struct Dumping(#[source] std::io::Error);

    #[test]
    fn causes_are_told_in_words_and_once() {
        let refused = || std::io::Error::from_raw_os_error(111);
        let text = "message: \"lost\": Connection refused (os error 111)";
        assert_eq!(report(&Dumping(refused())), text);
        assert_eq!(report(&refused()), "Connection refused (os error 111)");
    }
}

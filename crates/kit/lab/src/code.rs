//! The names of gRPC codes.

use tonic::Code;

/// A code as the CSI spec writes it.
pub(crate) fn name(code: Code) -> String {
    let mut name = String::new();
    for c in format!("{code:?}").chars() {
        if c.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_uppercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_named_as_in_the_spec() {
        assert_eq!(name(Code::InvalidArgument), "INVALID_ARGUMENT");
        assert_eq!(name(Code::NotFound), "NOT_FOUND");
        assert_eq!(name(Code::Ok), "OK");
    }
}

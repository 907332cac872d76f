"""The certificates of a run: signed by its own authority, for one address, and for nothing else."""

import datetime
import ipaddress

import pytest

x509 = pytest.importorskip("cryptography.x509", reason="needs cryptography: pip install 'shoal[hosts]'")

from cryptography.exceptions import InvalidSignature  # noqa: E402

from shoal.launch.certificates import CertificateAuthority  # noqa: E402


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
def test_a_host_s_certificate_names_its_address_and_is_signed_by_the_run(address):
    authority = CertificateAuthority()
    signer = x509.load_pem_x509_certificate(authority.certificate.encode())
    text, key = authority.issue(address)
    own = x509.load_pem_x509_certificate(text.encode())
    own.verify_directly_issued_by(signer)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address(address)]
    assert not own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert signer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    now = datetime.datetime.now(datetime.timezone.utc)
    assert own.not_valid_before_utc < now - datetime.timedelta(hours=23)
    assert own.not_valid_after_utc > now + datetime.timedelta(days=365)
    assert "PRIVATE KEY" in key and "PRIVATE KEY" not in text


def test_another_run_did_not_sign_it():
    signer = x509.load_pem_x509_certificate(CertificateAuthority().certificate.encode())
    other = x509.load_pem_x509_certificate(CertificateAuthority().issue("10.0.0.1")[0].encode())
    with pytest.raises(InvalidSignature):
        other.verify_directly_issued_by(signer)

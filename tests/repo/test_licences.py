def test_each_package_carries_the_licence_of_the_repository(root, package):
    assert (package.folder / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()


def test_the_licence_is_mit_of_the_efficio_authors(root):
    text = (root / "LICENSE").read_text(encoding="utf-8")
    assert text.startswith("MIT License\n")
    assert "the efficio authors" in text


def test_the_example_data_has_a_licence_beside_it(root):
    data = root / "examples" / "data"
    folders = {path.parent for path in data.rglob("*") if path.is_file() and not is_licence(path)}
    assert folders, "examples/data holds no files"
    for folder in folders:
        above = [folder, *folder.parents]
        above = above[: above.index(data) + 1]
        assert any(is_licence(path) for place in above for path in place.iterdir()), folder


def is_licence(path):
    return path.name.upper().startswith(("LICENSE", "LICENCE"))

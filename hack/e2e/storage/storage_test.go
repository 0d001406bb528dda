// Package storage is Kubernetes' own storage suites for drivers that -storage.testdriver describes, and for one driver
// that it cannot describe: the suites of v1.37 for SnapshotMetadata want to know a namespace of the driver, which a
// driver described by a file does not have, and end in a nil pointer without.
package storage

import (
	"context"
	"flag"
	"os"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubernetes/test/e2e/framework"
	"k8s.io/kubernetes/test/e2e/framework/config"
	"k8s.io/kubernetes/test/e2e/framework/testfiles"
	"k8s.io/kubernetes/test/e2e/framework/volume"
	storage "k8s.io/kubernetes/test/e2e/storage/framework"
	"k8s.io/kubernetes/test/e2e/storage/testsuites"
	"k8s.io/kubernetes/test/e2e/storage/utils"
	manifests "k8s.io/kubernetes/test/e2e/testing-manifests"

	// Each registers something by being there: the labels, what is looked at after a failure, and the suites.
	_ "k8s.io/kubernetes/test/e2e/feature"
	_ "k8s.io/kubernetes/test/e2e/framework/debug/init"
	_ "k8s.io/kubernetes/test/e2e/framework/node/init"
	_ "k8s.io/kubernetes/test/e2e/storage/external"
)

const class = "deltapath"

// metadata is the driver as the suite of SnapshotMetadata sees it.
type metadata struct{ storage.DriverInfo }

func (m *metadata) GetDriverInfo() *storage.DriverInfo { return &m.DriverInfo }

func (m *metadata) SkipUnsupportedTest(storage.TestPattern) string { return "" }

func (m *metadata) PrepareTest(_ context.Context, f *framework.Framework) *storage.PerTestConfig {
	// The suite makes a Secret, a Service and a SnapshotMetadataService there, for a driver that it installs itself.
	// Clients ask by the name of the driver, which finds the installed one.
	return &storage.PerTestConfig{Driver: m, Framework: f, Prefix: class, DriverNamespace: f.Namespace}
}

func (m *metadata) GetDynamicProvisionStorageClass(ctx context.Context, c *storage.PerTestConfig, _ string) *storagev1.StorageClass {
	installed, err := c.Framework.ClientSet.StorageV1().StorageClasses().Get(ctx, class, metav1.GetOptions{})
	framework.ExpectNoError(err)
	return storage.CopyStorageClass(installed, c.Framework.Namespace.Name, class)
}

func (m *metadata) GetSnapshotClass(_ context.Context, c *storage.PerTestConfig, parameters map[string]string) *unstructured.Unstructured {
	return utils.GenerateSnapshotClassSpec(m.Name, parameters, c.Framework.Namespace.Name)
}

var _ = framework.Describe("External Storage SnapshotMetadata", func() {
	driver := &metadata{storage.DriverInfo{
		Name:               "deltapath.csi.dev",
		SupportedFsType:    sets.NewString(""),
		SupportedSizeRange: volume.SizeRange{Min: "64Mi"},
		Capabilities: map[storage.Capability]bool{
			storage.CapPersistence:        true,
			storage.CapBlock:              true,
			storage.CapSnapshotDataSource: true,
			storage.CapSnapshotMetadata:   true,
		},
	}}
	storage.DefineTestSuites(driver, []func() storage.TestSuite{testsuites.InitSnapshotMetadataTestSuite})
})

func TestMain(m *testing.M) {
	config.CopyFlags(config.Flags, flag.CommandLine)
	framework.RegisterCommonFlags(flag.CommandLine)
	framework.RegisterClusterFlags(flag.CommandLine)
	flag.Parse()
	testfiles.AddFileSource(manifests.GetE2ETestingManifestsFS())
	framework.AfterReadingAllFlags(&framework.TestContext)
	os.Exit(m.Run())
}

func TestStorage(t *testing.T) {
	gomega.RegisterFailHandler(framework.Fail)
	suite, reporter := framework.CreateGinkgoConfig()
	ginkgo.RunSpecs(t, "Kubernetes storage suites", suite, reporter)
}
